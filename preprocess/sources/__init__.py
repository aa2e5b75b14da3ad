"""Sources: folders, archives and manifests, and what in them is rejected."""
