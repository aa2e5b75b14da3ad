"""Law 1: every random draw is a pure function of names (docs/randomness.md).

A draw is keyed by (seed, purpose, sample key, epoch or step, ...) and never by a rank, so that the same sample meets the
same noise at any world size, any sequence-parallel degree and after any resume. Draws are made on the CPU and moved, so
they are the same numbers on every kind of device.

The generator has versions (`VERSIONS`), and a cache or a run goes on with the one that it began with: a `Seed` says which. A plain
number as the seed means the newest one.
"""

from .draws import (
    VERSIONS,
    Seed,
    Stream,
    normal,
    normal_part,
    permutation,
    recorded_version,
    stream,
    symmetric,
    uniform,
)
from .names import key64
from .philox import VERSION as NEWEST

__all__ = [
    "NEWEST",
    "VERSIONS",
    "Seed",
    "Stream",
    "key64",
    "normal",
    "normal_part",
    "permutation",
    "recorded_version",
    "stream",
    "symmetric",
    "uniform",
]
