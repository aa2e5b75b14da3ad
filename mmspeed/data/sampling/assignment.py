"""Assign the samples of one step to the ranks of a world. Pure functions of counts and costs.

A *lane* computes its own samples: a data-parallel rank, or a sequence-parallel group of ranks. Every lane computes the same
number of *rows* (micro-batches), so that all take part in every collective; a *cell* is one row of one lane, samples of one lot.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

WORTH_A_ROW = 0.05  # of a step's time: what one more micro-batch must save
MOST = 10**12  # samples: more than any batch has, and few enough that no sum of them overflows


@dataclass(frozen=True)
class Cost:
    """Cost of computing n samples of a bucket at a time: fixed + n * each, in any unit that all buckets share."""

    fixed: float
    each: float

    def of(self, samples: int) -> float:
        return self.fixed + samples * self.each if samples else 0.0

    def fitting(self, target: float) -> int:
        """The most samples that cost no more than `target`, at most `MOST`; 0 if one costs more."""
        # slightly above the target: the cost of n samples must fit n, however it was rounded
        return max(0, int(min(MOST, (target * (1 + 1e-12) - self.fixed) / self.each)))


@dataclass(frozen=True)
class BucketBatch:
    """The samples of a step that are of one bucket. `most` may be computed at a time; None: any number."""

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


@functools.lru_cache(maxsize=32)  # one of ten thousand lanes takes a megabyte
def assign_slots(lots: tuple[BucketBatch, ...], lanes: int) -> Assignment:
    """The cells of every row and lane; None where no samples remain for a lane.

    Each sample is in exactly one cell. There are as few rows as `most` allows (a few more if that balances several lots much
    better), and then the costliest cell costs as little as possible. Cells of similar cost share a row, and within a row the lane
    with the smallest total gets the costliest (longest processing time first, Graham 1969). Raises ValueError without samples or lanes.
    """
    cells = [
        Slot(number, *_part(lot.count, count, place))
        for number, (lot, count) in enumerate(zip(lots, _best_cells(lots, lanes), strict=True))
        for place in range(count)
    ]
    return _in_rows(cells, [lots[cell.lot].cost.of(cell.size) for cell in cells], lanes)


def _in_rows(cells: Sequence[Slot], costs: Sequence[float], lanes: int) -> Assignment:
    """Arrange cells of similar cost in a row, the costliest on the lane with the smallest total."""
    order = sorted(range(len(cells)), key=costs.__getitem__, reverse=True)
    rows: list[tuple[Slot | None, ...]] = []
    totals = [0.0] * lanes
    for first in range(0, len(order), lanes):
        row: list[Slot | None] = [None] * lanes
        for lane, cell in zip(sorted(range(lanes), key=totals.__getitem__), order[first : first + lanes], strict=False):
            row[lane] = cells[cell]
            totals[lane] += costs[cell]
        rows.append(tuple(row))
    return tuple(rows)


def _best_cells(lots: tuple[BucketBatch, ...], lanes: int) -> list[int]:
    """The number of cells of each lot. If several lots leave lanes waiting, more rows are tried, and taken if they save enough."""
    best = _cells_of(lots, lanes)
    several = sum(count > 0 for count in best)
    costs = _cell_costs(lots, best)
    even, time, rows = sum(costs) / lanes, sum(costs[::lanes]), 0
    for more in range(1, 2 * several + 1 if several > 1 else 1):
        if time <= even * (1 + WORTH_A_ROW):
            break
        cells = _cells_of(lots, lanes, more)
        candidate_time = sum(_cell_costs(lots, cells)[::lanes])
        if candidate_time < time * (1 - WORTH_A_ROW * (more - rows)):
            best, time, rows = cells, candidate_time, more
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
    """The number of cells of each lot: the fewest that `most` allows, and more of the costliest, to fill the last row and `rows` more."""
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
    """Bounds of part number `place` when `count` things are divided into `parts`; sizes differ by one at most, larger ones first."""
    size, larger = divmod(count, parts)
    start = place * size + min(place, larger)
    return start, start + size + (place < larger)


@dataclass(frozen=True)
class StepLoad:
    """Cost of a step for a world. `slowest` sums each row's costliest cell: the time if all lanes wait for each other in every row."""

    slowest: float
    busiest: float  # total of the costliest lane: its time counts where lanes synchronise once a step
    mean: float
    rows: int
    idle: int  # cells without samples

    @property
    def imbalance(self) -> float:
        """Greatest over mean, at best 1, if lanes synchronise in every row."""
        return self.slowest / self.mean


@functools.lru_cache(maxsize=32)
def assignment_load(lots: tuple[BucketBatch, ...], lanes: int) -> StepLoad:
    """The load of assigning these lots to `lanes`."""
    costs = _cell_costs(lots, _best_cells(lots, lanes))
    rows, idle = -(-len(costs) // lanes), -len(costs) % lanes
    totals = [0.0] * lanes
    for first in range(0, len(costs), lanes):
        row = costs[first : first + lanes] + [0.0] * (idle if first + lanes > len(costs) else 0)
        totals = [total + cost for total, cost in zip(sorted(totals), row, strict=True)]
    return StepLoad(sum(costs[::lanes]), max(totals), sum(costs) / lanes, rows, idle)


Shares = Sequence[Sequence[float]]  # of the samples of each lot: the cost of each over its bucket's cost


def assign_by_share(
    lots: tuple[BucketBatch, ...], shares: Shares, lanes: int
) -> tuple[list[list[int]], Assignment, StepLoad]:
    """(order of each lot's samples in which cells count, cells, load) for samples of a bucket that differ in cost.

    There are as many cells as `assign_slots` makes, none with more samples than the largest of its lot. The cheapest of three ways is
    taken: all cells of a lot balanced; the costliest samples in separate rows, balanced within each; samples in their given order.
    """
    counts = _best_cells(lots, lanes)
    candidates = [
        _in_parts(
            lots, shares, [_even_parts(share, count) for share, count in zip(shares, counts, strict=True)], lanes
        ),
        _in_parts(
            lots, shares, [_sorted_parts(of, count, lanes) for of, count in zip(shares, counts, strict=True)], lanes
        ),
        ([list(range(lot.count)) for lot in lots], assign_slots(lots, lanes)),
    ]
    rated = [(orders, rows, _load_by_share(lots, shares, orders, rows)) for orders, rows in candidates]
    return min(rated, key=lambda option: (option[2].slowest, option[2].busiest))


Parts = list[list[int]]  # indices of a lot's samples, by cell


def _in_parts(
    lots: Sequence[BucketBatch], shares: Shares, parts: Sequence[Parts], lanes: int
) -> tuple[list[list[int]], Assignment]:
    """(the order of each lot's samples, the cells) of the parts of each lot."""
    cells = [slot for number, of in enumerate(parts) for slot in _slots(number, [len(part) for part in of])]
    costs = [
        _cell_cost(lot.cost, [share[place] for place in part])
        for lot, share, of in zip(lots, shares, parts, strict=True)
        for part in of
    ]
    return [[place for part in of for place in part] for of in parts], _in_rows(cells, costs, lanes)


def _even_parts(shares: Sequence[float], count: int) -> Parts:
    """`count` parts of similar cost, none larger than the smallest size that holds all: costliest first, to the cheapest with room."""
    order = sorted(range(len(shares)), key=lambda place: -shares[place])
    return _longest_first(order, shares, count, -(-len(shares) // count)) if count else []


def _sorted_parts(shares: Sequence[float], count: int, lanes: int) -> Parts:
    """Parts like those of `_even_parts`, where each row of `lanes` parts takes the costliest remaining samples."""
    order = sorted(range(len(shares)), key=lambda place: -shares[place])
    room = -(-len(order) // count) if count else 0
    parts: Parts = []
    while len(parts) < count:
        row = min(lanes, count - len(parts))
        size = min(row * room, len(order) - (count - len(parts) - row))
        parts += _longest_first(order[:size], shares, row, room)
        order = order[size:]
    return parts


def _longest_first(order: Sequence[int], shares: Sequence[float], count: int, room: int) -> Parts:
    """Distribute the indices `order` over `count` parts of at most `room`, each to the cheapest part; each part is sorted."""
    parts: Parts = [[] for _ in range(count)]
    cheapest = [(0.0, number) for number in range(count)]
    for place in order:
        total, number = heapq.heappop(cheapest)
        parts[number].append(place)
        if len(parts[number]) < room:
            heapq.heappush(cheapest, (total + shares[place], number))
    return [sorted(part) for part in parts]


def _slots(lot: int, sizes: Sequence[int]) -> list[Slot]:
    """Consecutive cells of the given sizes."""
    stops = itertools.accumulate(sizes)
    return [Slot(lot, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _cell_cost(cost: Cost, shares: Sequence[float]) -> float:
    return cost.fixed + cost.each * math.fsum(shares)


def _load_by_share(
    lots: Sequence[BucketBatch], shares: Shares, orders: Sequence[Sequence[int]], rows: Assignment
) -> StepLoad:
    """The load of the cells, with the samples' own costs."""

    def cost(cell: Slot | None) -> float:
        if cell is None:
            return 0.0
        cell_shares = [shares[cell.lot][place] for place in orders[cell.lot][cell.start : cell.stop]]
        return _cell_cost(lots[cell.lot].cost, cell_shares)

    costs = [[cost(cell) for cell in row] for row in rows]
    totals = [math.fsum(lane) for lane in zip(*costs, strict=True)]
    idle = sum(row.count(None) for row in rows)
    return StepLoad(sum(map(max, costs)), max(totals), math.fsum(totals) / len(totals), len(rows), idle)
