"""Recompute activations in backward."""
