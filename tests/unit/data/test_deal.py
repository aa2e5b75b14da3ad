"""Dealing a step to a world: every sample once, equal rows, and a costliest cell that no other dealing beats."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data.sampling.assignment import MOST, BucketBatch, Cost, assign_slots, assignment_load

costs = st.builds(Cost, st.sampled_from([0.0, 0.5]), st.sampled_from([1.0, 1.7, 3.0, 8.0]))
lots = st.lists(
    st.builds(BucketBatch, st.integers(1, 30), costs, st.none() | st.integers(1, 9)), min_size=1, max_size=4
).map(tuple)


@settings(max_examples=80, deadline=None)
@given(lots, st.integers(1, 9))
def test_every_sample_is_in_one_cell_and_lanes_have_equal_rows(dealt: tuple[BucketBatch, ...], lanes: int) -> None:
    rows = assign_slots(dealt, lanes)
    results: Counter[tuple[int, int]] = Counter()
    for row in rows:
        assert len(row) == lanes
        for cell in row:
            if cell is not None:
                assert 1 <= cell.size <= (dealt[cell.lot].most or cell.size)
                results.update((cell.lot, number) for number in range(cell.start, cell.stop))
    assert results == Counter((lot, number) for lot, of in enumerate(dealt) for number in range(of.count))
    fewest = sum(math.ceil(lot.count / (lot.most or lot.count)) for lot in dealt)
    more = len(rows) - math.ceil(fewest / lanes)
    assert 0 <= more <= (2 * len(dealt) if len(dealt) > 1 and lanes > 1 else 0), "more micro-batches than may pay"


def test_more_rows_where_they_pay() -> None:
    """Nine images and a video on two lanes: a lane each would take 216, in two rows of even cells it is 144."""
    assert assignment_load((BucketBatch(9, Cost(0, 24.0)), BucketBatch(1, Cost(0, 72.0))), 2).slowest == 144.0
    # a micro-batch that itself takes long is not worth it
    assert assignment_load((BucketBatch(9, Cost(100, 24.0)), BucketBatch(1, Cost(100, 72.0))), 2).rows == 1
    # and what comes out even is left alone
    assert assignment_load((BucketBatch(8, Cost(0, 3.0)), BucketBatch(2, Cost(0, 12.0))), 2).rows == 1


def best_possible(dealt: tuple[BucketBatch, ...], room: int) -> float:
    """The least that the costliest cell can cost, by trying every number of cells of every lot."""
    choices = [range(math.ceil(lot.count / (lot.most or lot.count)), lot.count + 1) for lot in dealt]
    return min(
        max(lot.cost.of(math.ceil(lot.count / count)) for lot, count in zip(dealt, counts, strict=True))
        for counts in itertools.product(*choices)
        if sum(counts) <= room
    )


@settings(max_examples=80, deadline=None)
@given(lots, st.integers(1, 6))
def test_the_costliest_cell_costs_as_little_as_it_can(dealt: tuple[BucketBatch, ...], lanes: int) -> None:
    if math.prod(lot.count for lot in dealt) > 30_000:
        dealt = dealt[:2]
    rows = assign_slots(dealt, lanes)
    worst = max(dealt[cell.lot].cost.of(cell.size) for row in rows for cell in row if cell is not None)
    assert worst == pytest.approx(best_possible(dealt, len(rows) * lanes), rel=1e-6)


@settings(max_examples=80, deadline=None)
@given(lots, st.integers(1, 9))
def test_the_load_is_that_of_the_cells(dealt: tuple[BucketBatch, ...], lanes: int) -> None:
    rows = [[dealt[cell.lot].cost.of(cell.size) if cell else 0.0 for cell in row] for row in assign_slots(dealt, lanes)]
    totals = [sum(lane) for lane in zip(*rows, strict=True)]
    load = assignment_load(dealt, lanes)
    assert load.slowest == pytest.approx(sum(map(max, rows))) and load.busiest == pytest.approx(max(totals))
    assert load.mean == pytest.approx(sum(totals) / lanes)
    assert (load.rows, load.idle) == (len(rows), sum(row.count(0.0) for row in rows))


def test_cells_of_like_cost_share_a_row_and_lanes_even_out() -> None:
    dealt = (BucketBatch(4, Cost(0, 8.0), 1), BucketBatch(8, Cost(0, 1.0), 2))
    rows = assign_slots(dealt, 4)
    assert [{cell.lot for cell in row if cell is not None} for row in rows] == [{0}, {1}]
    odd = (BucketBatch(3, Cost(0, 5.0), 1), BucketBatch(3, Cost(0, 4.0), 1), BucketBatch(2, Cost(0, 1.0), 1))
    totals = [0.0] * 4
    for row in assign_slots(odd, 4):
        for lane, cell in enumerate(row):
            totals[lane] += odd[cell.lot].cost.of(cell.size) if cell is not None else 0.0
    assert sorted(totals) == [6.0, 6.0, 8.0, 9.0]  # rows of 5 5 5 4 and 4 4 1 1


@given(costs, st.floats(0, 100))
def test_fitting_is_the_most_that_a_target_holds(cost: Cost, target: float) -> None:
    count = cost.fitting(target)
    assert count >= 0 and (count == 0 or cost.of(count) <= target * (1 + 1e-6) + 1e-6)
    assert cost.of(count + 1) > target * (1 - 1e-6) - 1e-6


@given(st.sampled_from([0.0, 0.123, 0.5, 10.0]), st.sampled_from([1e-14, 1e-9, 3e-7, 1.0, 1e9]), st.integers(1, 50))
def test_what_a_batch_costs_holds_the_batch(fixed: float, each: float, count: int) -> None:
    """Also where a sample costs next to nothing beside the step itself, as a measured line may have it."""
    cost = Cost(fixed, each)
    assert cost.fitting(cost.of(count)) >= count
    assert cost.fitting(1e308) == MOST
