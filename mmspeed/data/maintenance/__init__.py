"""Maintenance of a cache: verify, repair, merge, prune, pack, statistics."""
