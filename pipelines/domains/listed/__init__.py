"""Domains whose samples are a list in memory."""
