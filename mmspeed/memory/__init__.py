"""Save memory: recompute or offload activations, keep optimizer states in slower memory, and plan what a step takes."""

from .planning.peak import peak_bytes, resident_bytes
from .recompute.block_checkpoint import recompute
from .recompute.policy import BlockPolicies
from .recompute.regions import ActivationPolicies, set_policies

__all__ = ["ActivationPolicies", "BlockPolicies", "peak_bytes", "recompute", "resident_bytes", "set_policies"]
