"""Dealing: how the samples of one step are shared out over a world. Pure functions of counts and costs.

A *lane* is what meets its own samples: a data-parallel rank, or a sequence-parallel group of ranks. Every lane computes the same
number of *rows* (micro-batches), so that all meet in every collective; where a row meets a lane is a *cell*, samples of one lot.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

WORTH_A_ROW = 0.05  # of a step's time: what one more micro-batch must save
MOST = 10**12  # samples: more than any batch has, and few enough that no sum of them overflows


@dataclass(frozen=True)
class Cost:
    """What computing n samples of a bucket at a time costs: fixed + n * each, in any unit that all buckets share."""

    fixed: float
    each: float

    def of(self, samples: int) -> float:
        return self.fixed + samples * self.each if samples else 0.0

    def fitting(self, target: float) -> int:
        """The most samples that cost no more than `target`, at most `MOST`; 0 when one costs more."""
        # a little above the target: what n samples cost holds n, however it was rounded
        return max(0, int(min(MOST, (target * (1 + 1e-12) - self.fixed) / self.each)))


@dataclass(frozen=True)
class BucketBatch:
    """The samples of a step that are of one bucket. `most` is how many may be computed at a time; None: any number."""

    count: int
    cost: Cost
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Samples [start, stop) of a lot."""

    lot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Assignment = tuple[tuple["Slot | None", ...], ...]


@functools.lru_cache(maxsize=32)  # of ten thousand lanes one takes a megabyte
def assign_slots(lots: tuple[BucketBatch, ...], lanes: int) -> Assignment:
    """The cells of every row and lane; None where nothing is left for a lane.

    Each sample is in exactly one cell. There are as few rows as `most` allows (a few more where several lots come out much more
    even by it), and then the costliest cell costs as little as it can. Cells of like cost share a row, and within a row the lane
    that has had least gets the costliest (longest processing time first, Graham 1969). Raises ValueError without samples or lanes.
    """
    cells = [
        Slot(number, *_part(lot.count, count, place))
        for number, (lot, count) in enumerate(zip(lots, _best_cells(lots, lanes), strict=True))
        for place in range(count)
    ]
    costs = [lots[cell.lot].cost.of(cell.size) for cell in cells]
    order = sorted(range(len(cells)), key=costs.__getitem__, reverse=True)
    rows, totals = [], [0.0] * lanes
    for first in range(0, len(order), lanes):
        row: list[Slot | None] = [None] * lanes
        for lane, cell in zip(sorted(range(lanes), key=totals.__getitem__), order[first : first + lanes], strict=False):
            row[lane] = cells[cell]
            totals[lane] += costs[cell]
        rows.append(tuple(row))
    return tuple(rows)


def _best_cells(lots: tuple[BucketBatch, ...], lanes: int) -> list[int]:
    """How many cells each lot is cut into. Where several lots leave lanes waiting, more rows are tried, and must be worth it."""
    best = _cells_of(lots, lanes)
    several = sum(count > 0 for count in best)
    costs = _cell_costs(lots, best)
    even, time, rows = sum(costs) / lanes, sum(costs[::lanes]), 0
    for more in range(1, 2 * several + 1 if several > 1 else 1):
        if time <= even * (1 + WORTH_A_ROW):
            break
        cells = _cells_of(lots, lanes, more)
        tried = sum(_cell_costs(lots, cells)[::lanes])
        if tried < time * (1 - WORTH_A_ROW * (more - rows)):
            best, time, rows = cells, tried, more
    return best


def _cell_costs(lots: tuple[BucketBatch, ...], counts: list[int]) -> list[float]:
    """The costs of all cells, greatest first: with L lanes every L-th is a row's slowest."""
    costs: list[float] = []
    for lot, count in zip(lots, counts, strict=True):
        if count:
            size, larger = divmod(lot.count, count)
            costs += [lot.cost.of(size + 1)] * larger + [lot.cost.of(size)] * (count - larger)
    costs.sort(reverse=True)
    return costs


def _cells_of(lots: tuple[BucketBatch, ...], lanes: int, rows: int = 0) -> list[int]:
    """As few cells as `most` allows, then the costliest are cut anew, with what fills the last row and `rows` more."""
    if lanes < 1 or not any(lot.count for lot in lots):
        raise ValueError(f"nothing to deal: {lots} over {lanes} lanes")
    counts = [-(-lot.count // (lot.most or lot.count)) if lot.count else 0 for lot in lots]
    free = -sum(counts) % lanes + rows * lanes

    def largest(number: int) -> int:
        return -(-lots[number].count // counts[number])

    def entry(number: int) -> tuple[float, int]:
        return -lots[number].cost.of(largest(number)), number

    costliest = [entry(number) for number, count in enumerate(counts) if count]
    heapq.heapify(costliest)
    while free and (size := largest(number := costliest[0][1])) > 1:
        more = -(-lots[number].count // (size - 1)) - counts[number]
        if more > free:
            break
        counts[number] += more
        free -= more
        heapq.heapreplace(costliest, entry(number))
    return counts


def _part(count: int, parts: int, place: int) -> tuple[int, int]:
    """Bounds of one of `parts` parts of `count` things whose sizes differ by one at most, the larger ones first."""
    size, larger = divmod(count, parts)
    start = place * size + min(place, larger)
    return start, start + size + (place < larger)


@dataclass(frozen=True)
class StepLoad:
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


@functools.lru_cache(maxsize=32)
def assignment_load(lots: tuple[BucketBatch, ...], lanes: int) -> StepLoad:
    """What dealing these lots comes to."""
    costs = _cell_costs(lots, _best_cells(lots, lanes))
    rows, idle = -(-len(costs) // lanes), -len(costs) % lanes
    totals = [0.0] * lanes
    for first in range(0, len(costs), lanes):
        row = costs[first : first + lanes] + [0.0] * (idle if first + lanes > len(costs) else 0)
        totals = [total + cost for total, cost in zip(sorted(totals), row, strict=True)]
    return StepLoad(sum(costs[::lanes]), max(totals), sum(costs) / lanes, rows, idle)
