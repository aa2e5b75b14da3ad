"""Planners: they choose the keys that each group of queries keeps."""
