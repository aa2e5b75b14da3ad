"""Draws by name, with the generator that a seed says."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from mmspeed.errors import UserError

from . import first, philox


class Stream(Protocol):
    """The numbers of one name, one draw after another."""

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers, float32."""

    def normal_part(self, count: int, begin: int, end: int) -> Tensor:
        """The values begin..end-1 of `count` normal numbers."""

    def symmetric(self, shape: tuple[int, ...], bound: float) -> Tensor:
        """Uniform numbers between -bound and bound, float32."""

    def uniform(self) -> float:
        """A number in [0, 1)."""

    def permutation(self, count: int) -> npt.NDArray[Any]:
        """The numbers 0..count-1 in a random order, int64."""


VERSIONS = (first.VERSION, philox.VERSION)


class Seed(int):
    """A seed, with the version of the generator that draws from it (None: the newest); equal to its number.

    Raises ValueError for an unknown version.
    """

    generator: int

    def __new__(cls, seed: int, generator: int | None = None) -> Seed:
        generator = philox.VERSION if generator is None else generator
        if generator not in VERSIONS:
            raise ValueError(f"generator {generator} is none of {VERSIONS}")
        number = super().__new__(cls, seed)
        number.generator = generator
        return number

    def __repr__(self) -> str:
        return f"Seed({int(self)}, generator={self.generator})"


def recorded_version(record: dict[str, Any], origin: object) -> int:
    """The version of the generator that `versions` in a record of a cache or a run names; 1 in a record from before there were two.

    Raises UserError for one that this mmspeed does not have; `origin` is the place of the record.
    """
    versions = record.get("versions", {})
    version = versions.get("generator", first.VERSION) if isinstance(versions, dict) else versions
    if version not in VERSIONS or isinstance(version, bool):
        raise UserError(
            f"{origin} draws with generator {version!r}, and this mmspeed has {VERSIONS[0]} to {VERSIONS[-1]}: use a newer mmspeed"
        )
    return int(version)


def stream(seed: int, purpose: str, *names: object) -> Stream:
    """The numbers of one name, such as `stream(0, "step_order", epoch)`, for several draws from it."""
    version = seed.generator if isinstance(seed, Seed) else philox.VERSION
    kind = first.TorchStream if version == first.VERSION else philox.PhiloxStream
    return kind(int(seed), purpose, *names)


def normal(shape: tuple[int, ...], seed: int, purpose: str, *names: object) -> Tensor:
    """Standard normal numbers of `shape`, float32 on the CPU."""
    return stream(seed, purpose, *names).normal(shape)


def normal_part(count: int, begin: int, end: int, seed: int, purpose: str, *names: object) -> Tensor:
    """The values begin..end-1 of `normal((count,), ...)`; no others are drawn, except by version 1."""
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
