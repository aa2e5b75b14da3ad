"""Domains: what is trained on, and the models of it."""
