"""Memory: what is recomputed instead of kept."""

from .recompute import recompute

__all__ = ["recompute"]
