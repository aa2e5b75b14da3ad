"""Law 1: every random draw is a pure function of names.

A draw is keyed by (seed, purpose, sample key, epoch or step, ...) and never by a rank, so that the same sample meets the
same noise at any world size, any sequence-parallel degree and after any resume. Draws are made on the CPU and moved, so
they are the same numbers on every kind of device.
"""

from __future__ import annotations

import hashlib

import torch


def key64(*names: object) -> int:
    """A 63-bit integer that depends on every name and on their order. Names are ints, floats, strings or None."""
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *names: object) -> torch.Generator:
    """A CPU generator for one draw, such as `generator(0, "noise", sample_key, epoch)`."""
    return torch.Generator("cpu").manual_seed(key64(seed, purpose, *names))


def normal(shape: tuple[int, ...] | torch.Size, seed: int, purpose: str, *names: object) -> torch.Tensor:
    """Standard normal numbers of `shape`, float32 on the CPU."""
    return torch.randn(shape, generator=generator(seed, purpose, *names))


def uniform(seed: int, purpose: str, *names: object) -> float:
    """A number in [0, 1)."""
    return torch.rand((), generator=generator(seed, purpose, *names), dtype=torch.float64).item()
