"""Transformers of the `diffusers` library: their plans, and sparse attention in them."""
