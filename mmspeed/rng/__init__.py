"""Law 1: every random draw is a pure function of names (docs/randomness.md).

A draw is keyed by (seed, purpose, sample key, epoch or step, ...) and never by a rank, so that the same sample meets the
same noise at any world size, any sequence-parallel degree and after any resume. Draws are made on the CPU and moved, so
they are the same numbers on every kind of device. Caches and runs record the `VERSION` of the generator.
"""

from .draws import normal, normal_part, permutation, stream, symmetric, uniform
from .philox import VERSION, Stream, key64

__all__ = [
    "VERSION",
    "Stream",
    "key64",
    "normal",
    "normal_part",
    "permutation",
    "stream",
    "symmetric",
    "uniform",
]
