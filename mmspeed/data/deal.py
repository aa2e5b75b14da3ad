"""Dealing: how the samples of one step are shared out over a world. Pure functions of counts and costs.

A *lane* is what meets its own samples: a data-parallel rank, or a sequence-parallel group of ranks. Every lane computes the same
number of *rows* (micro-batches), so that all meet in every collective; where a row meets a lane is a *cell*, samples of one lot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What computing n samples of a bucket at a time costs: fixed + n * each, in any unit that all buckets share."""

    fixed: float
    each: float

    def of(self, samples: int) -> float:
        return self.fixed + samples * self.each if samples else 0.0

    def fitting(self, target: float) -> int:
        """The most samples that cost no more than `target`; 0 when one costs more."""
        return max(0, int((target - self.fixed) / self.each * (1 + 1e-12) + 1e-9))


@dataclass(frozen=True)
class Lot:
    """The samples of a step that are of one bucket. `most` is how many may be computed at a time; None: any number."""

    count: int
    cost: Cost
    most: int | None = None


@dataclass(frozen=True)
class Cell:
    """Samples [start, stop) of a lot."""

    lot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Rows = tuple[tuple["Cell | None", ...], ...]


@functools.lru_cache(maxsize=1024)
def deal(lots: tuple[Lot, ...], lanes: int) -> Rows:
    """The cells of every row and lane; None where nothing is left for a lane.

    Each sample is in exactly one cell. There are as few rows as `most` allows, and then the costliest cell costs as little as it
    can. Cells of like cost share a row, and within a row the lane that has had least gets the costliest (longest processing
    time first, Graham 1969). Raises ValueError without samples or lanes.
    """
    if lanes < 1 or not any(lot.count for lot in lots):
        raise ValueError(f"nothing to deal: {lots} over {lanes} lanes")
    counts = _cells_of(lots, lanes)
    cells = [
        Cell(number, *_part(lot.count, count, place))
        for number, (lot, count) in enumerate(zip(lots, counts, strict=True))
        for place in range(count)
    ]
    cells.sort(key=lambda cell: -lots[cell.lot].cost.of(cell.size))
    rows, totals = [], [0.0] * lanes
    for first in range(0, len(cells), lanes):
        row: list[Cell | None] = [None] * lanes
        for lane, cell in zip(sorted(range(lanes), key=totals.__getitem__), cells[first : first + lanes], strict=False):
            row[lane] = cell
            totals[lane] += lots[cell.lot].cost.of(cell.size)
        rows.append(tuple(row))
    return tuple(rows)


def _cells_of(lots: tuple[Lot, ...], lanes: int) -> list[int]:
    """How many cells each lot is cut into."""

    def needed(target: float | None) -> list[int]:
        counts = []
        for lot in lots:
            size = lot.most or lot.count
            if target is not None:
                size = max(1, min(size, lot.cost.fitting(target)))
            counts.append(-(-lot.count // size) if lot.count else 0)
        return counts

    fewest = needed(None)
    room = -(-sum(fewest) // lanes) * lanes
    high = max(lot.cost.of(min(lot.count, lot.most or lot.count)) for lot in lots)
    low = max(lot.cost.of(1) for lot in lots if lot.count)
    if sum(needed(low)) <= room:
        return needed(low)
    for _ in range(50):  # bisection on the cost of the costliest cell
        middle = (low + high) / 2
        if sum(needed(middle)) <= room:
            high = middle
        else:
            low = middle
    return needed(high)


def _part(count: int, parts: int, place: int) -> tuple[int, int]:
    """Bounds of one of `parts` parts of `count` things whose sizes differ by one at most, the larger ones first."""
    size, larger = divmod(count, parts)
    start = place * size + min(place, larger)
    return start, start + size + (place < larger)


@dataclass(frozen=True)
class Load:
    """What a step costs a world. `slowest` adds up each row's costliest cell: the time when all wait for each other in every row."""

    slowest: float
    busiest: float  # the lane with the most, which decides where lanes meet once a step
    mean: float
    rows: int
    idle: int  # cells without samples

    @property
    def imbalance(self) -> float:
        """Greatest over mean, 1 at best, where lanes meet in every row."""
        return self.slowest / self.mean


@functools.lru_cache(maxsize=4096)
def load_of(lots: tuple[Lot, ...], lanes: int) -> Load:
    """What dealing these lots comes to."""
    totals, slowest, idle = [0.0] * lanes, 0.0, 0
    rows = deal(lots, lanes)
    for row in rows:
        costs = [0.0 if cell is None else lots[cell.lot].cost.of(cell.size) for cell in row]
        slowest += max(costs)
        idle += row.count(None)
        totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
    return Load(slowest, max(totals), sum(totals) / lanes, len(rows), idle)
