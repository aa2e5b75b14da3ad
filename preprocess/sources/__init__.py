"""Sources: folders, archives and manifests, and the rejection of files in them."""
