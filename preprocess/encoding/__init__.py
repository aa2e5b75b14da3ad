"""Encoding of clips and captions to entries of the cache."""
