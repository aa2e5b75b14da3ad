"""Techniques on the boundaries of a model's modules, as its plan declares them."""
