"""Planners: which keys each group of queries keeps."""
