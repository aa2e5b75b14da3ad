"""Dealing: how the samples of one step are shared out over a world. Pure functions of counts and costs.

A *lane* is what meets its own samples: a data-parallel rank, or a sequence-parallel group of ranks. Every lane computes the same
number of *rows* (micro-batches), so that all meet in every collective; where a row meets a lane is a *cell*, samples of one lot.
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
    return _in_rows(cells, [lots[cell.lot].cost.of(cell.size) for cell in cells], lanes)


def _in_rows(cells: Sequence[Slot], costs: Sequence[float], lanes: int) -> Assignment:
    """Cells of like cost in a row, the costliest of it on the lane that has had least."""
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


Shares = Sequence[Sequence[float]]  # of the samples of each lot: what one costs, over what its bucket says


def assign_by_share(
    lots: tuple[BucketBatch, ...], shares: Shares, lanes: int
) -> tuple[list[list[int]], Assignment, StepLoad]:
    """(the order of each lot's samples that cells count in, the cells, their load) where samples of a bucket do not cost alike.

    There are as many cells as `assign_slots` makes, none with more samples than the largest of its lot. Of three ways the one in which rows
    take least: all cells of a lot alike; the costliest samples in rows of their own, alike within each; samples as they stand.
    """
    counts = _best_cells(lots, lanes)
    tried = [
        _in_parts(
            lots, shares, [_even_parts(share, count) for share, count in zip(shares, counts, strict=True)], lanes
        ),
        _in_parts(
            lots, shares, [_sorted_parts(of, count, lanes) for of, count in zip(shares, counts, strict=True)], lanes
        ),
        ([list(range(lot.count)) for lot in lots], assign_slots(lots, lanes)),
    ]
    found = [(orders, rows, _load_by_share(lots, shares, orders, rows)) for orders, rows in tried]
    return min(found, key=lambda each: (each[2].slowest, each[2].busiest))


Parts = list[list[int]]  # places of a lot's samples, by cell


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
    """So many parts of like cost, none of more samples than the least that holds all: longest first, to the cheapest with room."""
    order = sorted(range(len(shares)), key=lambda place: -shares[place])
    return _longest_first(order, shares, count, -(-len(shares) // count)) if count else []


def _sorted_parts(shares: Sequence[float], count: int, lanes: int) -> Parts:
    """As `_even_parts`, where each row of `lanes` parts takes the costliest samples that are left."""
    order = sorted(range(len(shares)), key=lambda place: -shares[place])
    room = -(-len(order) // count) if count else 0
    parts: Parts = []
    while len(parts) < count:
        row = min(lanes, count - len(parts))
        taken = min(row * room, len(order) - (count - len(parts) - row))
        parts += _longest_first(order[:taken], shares, row, room)
        order = order[taken:]
    return parts


def _longest_first(order: Sequence[int], shares: Sequence[float], count: int, room: int) -> Parts:
    """The places `order` in `count` parts of at most `room`, each to the part that has had least; in each as they stand."""
    parts: Parts = [[] for _ in range(count)]
    cheapest = [(0.0, number) for number in range(count)]
    for place in order:
        total, number = heapq.heappop(cheapest)
        parts[number].append(place)
        if len(parts[number]) < room:
            heapq.heappush(cheapest, (total + shares[place], number))
    return [sorted(part) for part in parts]


def _slots(lot: int, sizes: Sequence[int]) -> list[Slot]:
    """Cells of so many samples each, one after another."""
    stops = itertools.accumulate(sizes)
    return [Slot(lot, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _cell_cost(cost: Cost, shares: Sequence[float]) -> float:
    return cost.fixed + cost.each * math.fsum(shares)


def _load_by_share(
    lots: Sequence[BucketBatch], shares: Shares, orders: Sequence[Sequence[int]], rows: Assignment
) -> StepLoad:
    """What the cells come to."""

    def cost(cell: Slot | None) -> float:
        if cell is None:
            return 0.0
        own = [shares[cell.lot][place] for place in orders[cell.lot][cell.start : cell.stop]]
        return _cell_cost(lots[cell.lot].cost, own)

    costs = [[cost(cell) for cell in row] for row in rows]
    totals = [math.fsum(lane) for lane in zip(*costs, strict=True)]
    idle = sum(row.count(None) for row in rows)
    return StepLoad(sum(map(max, costs)), max(totals), math.fsum(totals) / len(totals), len(rows), idle)
