"""Which samples an epoch uses, and how often: repeats, and shares of several data sets. Pure functions of counts.

A *pool* is the samples of one bucket and one data set. In an epoch it is used `uses` times: as often round as `uses` holds its size,
and for the rest in turn, so that over the epochs each of its samples is used as often as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmspeed.rng import generator
from mmspeed.shapes import Bucket

Array = npt.NDArray[Any]


def rates(
    sizes: Mapping[str, int],
    repeats: Mapping[str, int] | int = 1,
    weights: Mapping[str, float] | None = None,
    temperature: float | None = None,
) -> dict[str, float]:
    """How often an epoch uses a sample of each data set, on average.

    With `weights`, or a `temperature` t (weights of size ** (1 / t), after Arivazhagan et al. 2019), the data sets have such
    shares of an epoch of as many uses as there are samples (times `repeats`); a data set without samples, or of weight 0, has 0.
    """
    there = {name: size for name, size in sizes.items() if size}
    times = {name: repeats if isinstance(repeats, int) else repeats.get(name, 1) for name in sizes}
    if temperature is not None and weights is None:
        weights = {name: size ** (1 / temperature) for name, size in there.items()}
    if weights is None:
        return {name: float(times[name]) for name in sizes}
    whole = sum(size * times[name] for name, size in there.items())
    total = sum(weights.get(name, 0.0) for name in there)
    if not total:
        return dict.fromkeys(sizes, 0.0)
    return {name: whole * weights.get(name, 0.0) / total / there[name] if name in there else 0.0 for name in sizes}


@dataclass(frozen=True)
class Pool:
    """Samples of one bucket and data set: their places among all samples, and how many uses an epoch makes of them."""

    bucket: Bucket
    dataset: str
    places: Array
    uses: int

    @classmethod
    def at_rate(cls, bucket: Bucket, dataset: str, places: Array, rate: float) -> Pool:
        """`rate` uses a sample; at least one use an epoch in all, so that no pool is left out by rounding."""
        return cls(bucket, dataset, places, max(1, round(rate * len(places))) if rate else 0)

    def in_turn(self, epoch: int, seed: int) -> tuple[Array, Array]:
        """(places, repeats) of the uses that do not make a whole round: the next ones in turn."""
        size = len(self.places)
        rounds, over = divmod(self.uses, size)
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
        """All places in the order of one turn."""
        names = self.bucket.name, self.dataset, turn
        return self.places[torch.randperm(len(self.places), generator=generator(seed, "turn", *names)).numpy()]


class Uses:
    """An epoch's uses of one bucket, in a random order: those of its pools one after another, shuffled."""

    def __init__(self, pools: list[Pool], epoch: int, seed: int) -> None:
        self._pools, self._ends = pools, np.cumsum([pool.uses for pool in pools])
        self._in_turn = [pool.in_turn(epoch, seed) for pool in pools]
        names = epoch, pools[0].bucket.name
        self._order = torch.randperm(int(self._ends[-1]), generator=generator(seed, "sample_order", *names)).numpy()

    def __getitem__(self, part: slice) -> list[tuple[int, int]]:
        """(place, repeat) of some of the uses: the sample, and the how manieth time the epoch uses it."""
        return [self._use(number) for number in self._order[part].tolist()]

    def _use(self, number: int) -> tuple[int, int]:
        which = int(np.searchsorted(self._ends, number, side="right"))
        pool = self._pools[which]
        number -= int(self._ends[which]) - pool.uses
        repeat, at = divmod(number, len(pool.places))
        if repeat < pool.uses // len(pool.places):
            return int(pool.places[at]), repeat
        places, repeats = self._in_turn[which]
        return int(places[at]), int(repeats[at])
