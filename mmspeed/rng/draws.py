"""Draws by name."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from torch import Tensor

from .philox import Stream


def stream(seed: int, purpose: str, *names: object) -> Stream:
    """The numbers of one name, such as `stream(0, "step_order", epoch)`, for several draws from it."""
    return Stream(seed, purpose, *names)


def normal(shape: tuple[int, ...], seed: int, purpose: str, *names: object) -> Tensor:
    """Standard normal numbers of `shape`, float32 on the CPU."""
    return stream(seed, purpose, *names).normal(shape)


def normal_part(count: int, begin: int, end: int, seed: int, purpose: str, *names: object) -> Tensor:
    """The values begin..end-1 of `normal((count,), ...)`; no others are drawn."""
    if not 0 <= begin <= end <= count:
        raise ValueError(f"{begin} to {end} is no part of {count} numbers")
    return stream(seed, purpose, *names).normal_part(count, begin, end)


def symmetric(shape: tuple[int, ...], bound: float, seed: int, purpose: str, *names: object) -> Tensor:
    """Uniform numbers between -bound and bound of `shape`, float32 on the CPU."""
    return stream(seed, purpose, *names).symmetric(shape, bound)


def uniform(seed: int, purpose: str, *names: object) -> float:
    """A number in [0, 1), a multiple of 2**-53."""
    return stream(seed, purpose, *names).uniform()


def permutation(count: int, seed: int, purpose: str, *names: object) -> npt.NDArray[Any]:
    """The numbers 0..count-1 in a random order, int64."""
    return stream(seed, purpose, *names).permutation(count)
