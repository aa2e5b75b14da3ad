"""Memory: what is recomputed instead of kept, and how much a step takes."""

from .peak import peak_bytes, resident_bytes
from .recompute import recompute

__all__ = ["peak_bytes", "recompute", "resident_bytes"]
