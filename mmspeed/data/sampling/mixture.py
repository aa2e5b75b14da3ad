"""Uses of samples in an epoch: repeats, and shares of several data sets. Pure functions of counts.

A *pool* is the samples of one bucket and one data set. In an epoch it has `uses` uses: as many whole rounds as fit, and the rest in
turn, so that over the epochs all its samples are used equally often.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.protocols import ShapeClass
from mmspeed.rng import permutation

Array = npt.NDArray[Any]


def rates(
    sizes: Mapping[str, int],
    repeats: Mapping[str, int] | int = 1,
    weights: Mapping[str, float] | None = None,
    temperature: float | None = None,
) -> dict[str, float]:
    """The average number of uses in an epoch of a sample of each data set.

    With `weights`, or a `temperature` t (weights of size ** (1 / t), after Arivazhagan et al. 2019), the data sets have these
    shares of an epoch with as many uses as there are samples (times `repeats`); a data set without samples, or of weight 0, gets 0.
    """
    present = {name: size for name, size in sizes.items() if size}
    times = {name: repeats if isinstance(repeats, int) else repeats.get(name, 1) for name in sizes}
    if temperature is not None and weights is None:
        shares = over_largest(present, 1 / temperature)
    elif weights is not None:
        shares = over_largest({name: weights.get(name, 0.0) for name in present})
    else:
        return {name: float(times[name]) for name in sizes}
    total_uses = sum(size * times[name] for name, size in present.items())
    total = sum(shares.values())
    return {name: total_uses * shares[name] / total / present[name] if shares.get(name) else 0.0 for name in sizes}


def over_largest(values: Mapping[str, float], power: float = 1.0) -> dict[str, float]:
    """The values (value / largest) ** power, which never overflow, and are 0 only for a value of 0."""
    largest = max(values.values(), default=0)
    return {
        name: max((value / largest) ** power, sys.float_info.min) if value else 0.0 for name, value in values.items()
    }


def uses_of(sizes: Sequence[int], rate: float) -> list[int]:
    """The numbers of uses in an epoch of pools of one data set, at `rate` uses per sample; at least 1, so that none is left out.

    Rounding errors are compensated by larger pools, so that the sum is right.
    """
    uses, owed = [0] * len(sizes), 0.0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if sizes[index] and rate:
            owed += rate * sizes[index]
            uses[index] = max(1, round(owed))
            owed -= uses[index]
    return uses


@dataclass(frozen=True)
class SamplePool:
    """Samples of one bucket and data set: their indices among all samples, and the number of their uses in an epoch."""

    bucket: ShapeClass
    dataset: str
    places: Array
    uses: int

    def in_turn(self, epoch: int, seed: int) -> tuple[Array, Array]:
        """(indices, repeats) of the uses beyond whole rounds: the next samples in turn."""
        size = len(self.places)
        rounds, over = divmod(self.uses, size)
        if not over:
            return self.places[:0], self.places[:0]
        turn, begin = divmod(epoch * over, size)
        places = self._turn(turn, seed)[begin : begin + over]
        repeats = np.full(over, rounds)
        if len(places) < over:
            # the next turn may begin with samples that this epoch has used already
            more = self._turn(turn + 1, seed)[: over - len(places)]
            repeats[len(places) :] += np.isin(more, places)
            places = np.concatenate([places, more])
        return places, repeats

    def _turn(self, turn: int, seed: int) -> Array:
        """All indices in the order of one turn."""
        names = self.bucket.name, self.dataset, turn
        return self.places[permutation(len(self.places), seed, "turn", *names)]


class BucketUses:
    """An epoch's uses of one bucket, in a random order: those of its pools one after another, shuffled."""

    def __init__(self, pools: list[SamplePool], epoch: int, seed: int) -> None:
        self._pools, self._ends = pools, np.cumsum([pool.uses for pool in pools])
        self._in_turn = [pool.in_turn(epoch, seed) for pool in pools]
        names = epoch, pools[0].bucket.name
        self._order = permutation(int(self._ends[-1]), seed, "sample_order", *names)

    def __getitem__(self, part: slice) -> list[tuple[int, int]]:
        """(index, repeat) of some of the uses: the sample, and the number of its earlier uses in the epoch."""
        numbers = self._order[part]
        of_pool = np.searchsorted(self._ends, numbers, side="right")
        rows = np.empty((len(numbers), 2), np.int64)
        for pool_number, (pool, turn) in enumerate(zip(self._pools, self._in_turn, strict=True)):
            mine = np.flatnonzero(of_pool == pool_number)
            repeat, at = np.divmod(numbers[mine] - (self._ends[pool_number] - pool.uses), len(pool.places))
            late = repeat == pool.uses // len(pool.places)  # beyond the whole rounds
            rows[mine, 0], rows[mine, 1] = pool.places[at], repeat
            rows[mine[late], 0], rows[mine[late], 1] = turn[0][at[late]], turn[1][at[late]]
        return [(place, repeat) for place, repeat in rows.tolist()]
