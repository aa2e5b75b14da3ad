"""Train transformers of the `diffusers` library: their calls, plans, small configs and sparse attention."""
