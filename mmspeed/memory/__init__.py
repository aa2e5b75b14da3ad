"""Memory: what backward finds and what it computes again, what lies in the host's memory meanwhile, and how much a step takes."""

from .planning.peak import peak_bytes, resident_bytes
from .recompute.block_checkpoint import recompute
from .recompute.policy import Keeping
from .recompute.spans import Ways, set_ways, span

__all__ = ["Keeping", "Ways", "peak_bytes", "recompute", "resident_bytes", "set_ways", "span"]
