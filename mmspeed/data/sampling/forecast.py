"""Forecast an epoch at a world size, before training: steps, balance, unused samples. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmspeed.protocols import ShapeClass

from .order import Batching
from .rank_batches import step_load
from .schedule import Array, EpochSchedule


@dataclass(frozen=True)
class Forecast:
    """An epoch at one world size. Arrays have an entry for each step, in the order of training.

    Imbalance is greatest over mean cost across ranks, at best 1: `lockstep` if ranks synchronise in every micro-batch (sharded
    parameters), `window` if they synchronise once a step.
    """

    world: int
    steps: int
    samples: int  # uses of samples; every one of the epoch is in exactly one step
    tokens: int
    lockstep: Array
    window: Array
    cost: Array  # mean over ranks, in the batching's unit
    size: Array  # samples of a step
    rows: Array  # micro-batches of each rank
    mixed: int  # steps of several buckets
    idle: int  # micro-batches of some rank that only synchronise it with the others (weight 0)
    unmet: int  # uses left out: 0

    @property
    def epoch_imbalance(self) -> float:
        """Greatest over mean of the whole epoch's time: the share of the mean that devices wait, plus 1."""
        return float((self.lockstep * self.cost).sum() / self.cost.sum())

    @property
    def short(self) -> int:
        """Steps with less than 9 tenths of the median step's cost."""
        return int((self.cost < 0.9 * np.median(self.cost)).sum())


def forecast(
    plan: EpochSchedule,
    buckets: Sequence[ShapeClass],
    batching: Batching,
    world: int,
    uses: int,
    tokens: Callable[[ShapeClass], int],
) -> Forecast:
    """Forecast an epoch. `buckets` lists the buckets by the plan's numbers, `uses` is the number of uses in an epoch.

    Steps of the same composition are computed once, so an epoch of a million samples takes a second or two.
    """
    cached: dict[tuple[tuple[int, int], ...], tuple[float, ...]] = {}
    rows = []
    for step in range(plan.steps):
        composition = tuple((bucket, count) for bucket, _, count in plan.pieces(step))
        if composition not in cached:
            cached[composition] = _figures(
                [(buckets[bucket], count) for bucket, count in composition], batching, world, tokens
            )
        rows.append(cached[composition])
    columns: Any = np.array(rows, dtype=np.float64).T
    slowest, busiest, mean, size, micro, idle, pieces, step_tokens = columns
    return Forecast(
        world=world,
        steps=plan.steps,
        samples=int(size.sum()),
        tokens=int(step_tokens.sum()),
        lockstep=slowest / mean,
        window=busiest / mean,
        cost=mean,
        size=size.astype(np.int64),
        rows=micro.astype(np.int64),
        mixed=int((pieces > 1).sum()),
        idle=int(idle.sum()),
        unmet=uses - int(size.sum()),
    )


def _figures(
    pieces: list[tuple[ShapeClass, int]], batching: Batching, world: int, tokens: Callable[[ShapeClass], int]
) -> tuple[float, ...]:
    """Figures of one step: slowest, busiest and mean cost of a rank, samples, micro-batches of a rank, idle ones, buckets, tokens."""
    load = step_load(pieces, batching, world)
    size = sum(count for _, count in pieces)
    token_count = sum(count * tokens(bucket) for bucket, count in pieces)
    return load.slowest, load.busiest, load.mean, size, load.rows, load.idle, len(pieces), token_count
