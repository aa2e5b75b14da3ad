"""Parallelism and sparse attention at the boundaries of a model's modules, as its plan declares them."""
