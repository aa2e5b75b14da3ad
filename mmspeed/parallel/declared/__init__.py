"""Sequence parallelism for models that were written without it, by a plan."""
