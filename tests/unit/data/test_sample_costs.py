"""Samples of one shape class that do not cost alike: packs of documents, of which attention sees each document alone.

A pack costs a * tokens + b * (sum of the squares of its documents' lengths).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from torch import nn

from mmspeed.config import RunConfig
from mmspeed.data.sampling.assignment import BucketBatch, Cost, assign_by_share, assign_slots
from mmspeed.data.sampling.rank_batches import imbalance, rank_batches, ranks_of_samples
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.listed.domain import Length, ListedDomain, ListedSample
from mmspeed.protocols import Batch, Inputs, RunPlace, ShapeClass, Work

A, B = 6.0, 4.0  # products a token, attention a pair of tokens of one document


class PacksConfig(RunConfig):
    """A run of the task of packs."""

    task: Literal["packs"] = Field("packs", description="What is trained.")


class PacksTask(ListedDomain[PacksConfig]):
    """Packs of a length, given by the lengths of their documents; what is left of a pack is padding (document -1)."""

    name = "packs"
    packs: ClassVar[Mapping[int, Sequence[Sequence[int]]]] = {}

    def build(self) -> dict[str, nn.Module]:
        return {"model": nn.Sequential(nn.Linear(1, 1))}

    def samples(self) -> tuple[Sequence[ListedSample], Sequence[ListedSample]]:
        return [
            pack(f"{n:03d} of {size}", size, of) for size, some in self.packs.items() for n, of in enumerate(some)
        ], []

    def inputs(self, model: nn.Module, batch: Batch, *others: Any) -> Inputs:
        raise AssertionError("nothing is trained here")

    values = inputs  # type: ignore[assignment]

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        return Work(A * shape.numbers, B * shape.numbers**2)

    def sample_work(self, sample: ListedSample) -> Work:
        lengths = torch.bincount(sample.tensors["document"] + 1)[1:]
        return Work(A * sample.tokens, B * float(lengths.square().sum()))


def pack(name: str, size: int, lengths: Sequence[int]) -> ListedSample:
    """The number of each token's document."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    document = torch.tensor(numbers + [-1] * (size - len(numbers)))
    return ListedSample(name, {"document": document}, Length(size), len(numbers))


def make(packs: Mapping[int, Sequence[Sequence[int]]], **tree: Any) -> PacksTask:
    """The task of these packs, under a config."""

    class Packs(PacksTask):
        pass

    Packs.packs = packs
    return Packs(PacksConfig(**{"train": {"prefetch": 0}} | tree))


def place(rank: int = 0, world: int = 1) -> RunPlace:
    return RunPlace(Device("cpu", 0), rank, world, groups=world, group=rank, dealt=world, number=rank)


def by_hand(lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward."""
    return 3 * (A * sum(lengths) + B * sum(length**2 for length in lengths))


lengths = st.lists(st.integers(1, 16), min_size=1, max_size=4).filter(lambda of: sum(of) <= 16)
packs = st.lists(lengths, min_size=1, max_size=14)
shares_of_lots = st.lists(
    st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.1, 2.0, 4.0]), min_size=1, max_size=12), min_size=1, max_size=3
)


def lots_of(shares: Sequence[Sequence[float]], each: Sequence[float], most: int | None) -> tuple[BucketBatch, ...]:
    return tuple(
        BucketBatch(len(of), Cost(0.0, one), most) for of, one in zip(shares, itertools.cycle(each), strict=False)
    )


def slowest(lots: Sequence[BucketBatch], shares: Sequence[Sequence[float]], orders: Any, rows: Any) -> float:
    """The sum of the costs of each row's costliest cell."""
    costs = [
        [
            lots[cell.lot].cost.each
            * sum(shares[cell.lot][place] for place in orders[cell.lot][cell.start : cell.stop])
            for cell in row
            if cell is not None
        ]
        for row in rows
    ]
    return sum(map(max, costs))


@settings(max_examples=80, deadline=None)
@given(
    shares_of_lots,
    st.lists(st.sampled_from([1.0, 2.5, 7.0]), min_size=1),
    st.none() | st.integers(1, 4),
    st.integers(1, 5),
)
def test_own_costs_are_never_shared_out_worse_than_the_classes_would(
    shares: list[list[float]], each: list[float], most: int | None, lanes: int
) -> None:
    lots = lots_of(shares, each, most)
    orders, rows, load = assign_by_share(lots, shares, lanes)
    plain = assign_slots(lots, lanes)
    drawn = [range(len(of)) for of in shares]
    assert [sorted(order) for order in orders] == [list(of) for of in drawn]
    met = Counter(
        (cell.lot, orders[cell.lot][n]) for row in rows for cell in row if cell for n in range(cell.start, cell.stop)
    )
    assert met == Counter((lot, n) for lot, of in enumerate(drawn) for n in of)
    assert len(rows) == len(plain) and {len(row) for row in rows} == {lanes}
    largest = Counter[int]()
    for cell in (cell for row in plain for cell in row if cell is not None):
        largest[cell.lot] = max(largest[cell.lot], cell.size)
    assert all(1 <= cell.size <= largest[cell.lot] for row in rows for cell in row if cell is not None)
    actual = slowest(lots, shares, orders, rows)
    assert actual <= slowest(lots, shares, drawn, plain) * (1 + 1e-12) and load.slowest == pytest.approx(actual)
    total = sum(lot.cost.each * sum(of) for lot, of in zip(lots, shares, strict=True))
    assert load.mean == pytest.approx(total / lanes) and load.imbalance >= 1 - 1e-12


def test_one_long_document_is_met_by_short_ones() -> None:
    task = make({16: [[16], [16], [2] * 8, [2] * 8]}, train={"batch_size": 4, "prefetch": 0})
    data = task.data(place())
    draws, batching = data.sampler.draws(0), task.batching(place())
    costs = {key: by_hand(lengths) for key, lengths in zip(sorted(task.by_key), task.packs[16], strict=True)}
    for rank in range(2):
        [batch] = rank_batches(draws, batching, rank, 2)
        assert sorted(costs[draw.sample.key] for draw, _ in batch) == [by_hand([2] * 8), by_hand([16])]
    assert imbalance(draws, batching, 2) == pytest.approx(1.0)
    four = 4 * by_hand([16]) / (2 * by_hand([16]) + 2 * by_hand([2] * 8))
    assert imbalance(draws, batching, 4) == pytest.approx(four)


@settings(max_examples=40, deadline=None)
@given(
    packs,
    st.lists(lengths, max_size=5),
    st.integers(1, 8),
    st.none() | st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["samples", "flops", "tokens"]),
)
def test_each_pack_is_met_once_on_any_number_of_ranks(
    some: list[list[int]], longer: list[list[int]], batch: int, micro: int | None, world: int, by: str
) -> None:
    batching = {"by": by, "slots": None if by == "samples" else 4, "mix": "window"}
    train: dict[str, Any] = {"batch_size": batch} if by == "samples" else {}
    train |= {"micro_batch_size": micro, "prefetch": 0}
    task = make({16: some, 24: longer} if longer else {16: some}, train=train, batching=batching)
    alone, shared = task.data(place()), task.data(place(0, world))
    met: Counter[str] = Counter()
    for step in takewhile(lambda step: alone.locate(step).epoch == 0, count()):
        draws = alone.sampler.draws(step)
        assert [draw.name for draw in draws] == [draw.name for draw in shared.sampler.draws(step)]
        ranks = [rank_batches(draws, shared.sampler.batching, rank, world) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        for part in (part for batches in ranks for part in batches):
            assert len({draw.sample.shape for draw, _ in part}) == 1
            assert len(part) <= (shared.sampler.batching.at_a_time(part[0][0].sample.shape) or len(draws))
            met.update({draw.sample.key: weight for draw, weight in part})
        homes = {draw.name: home for draw, home in ranks_of_samples(draws, shared.sampler.batching, world)}
        for rank, batches in enumerate(ranks):
            assert all(rank in homes[draw.name] for part in batches for draw, weight in part if weight)
        costs = [
            [sum(task.sample_cost(draw.sample) for draw, weight in part if weight) for part in each] for each in ranks
        ]
        if by != "tokens":  # by which classes count by their tokens
            mean = sum(map(sum, costs)) / world
            spread = imbalance(draws, shared.sampler.batching, world)
            assert spread == pytest.approx(sum(map(max, zip(*costs, strict=True))) / mean)
    assert met == dict.fromkeys(task.by_key, 1.0)


def test_other_costs_of_the_same_packs_make_other_batches() -> None:
    """Sizes by FLOPs go by the mean of the samples' own; a run that goes on with others gets a message."""
    packs = {16: [[16], [2] * 8, [4] * 4, [8, 8]]}
    tree: dict[str, Any] = {"batching": {"by": "flops", "budget": 2 * by_hand([16]) / 1e12, "slots": 1}}
    task = make(packs, **tree)
    mean = sum(map(by_hand, packs[16])) / 4
    batching = task.batching(place())
    assert batching.sizes[Length(16)] == int(2 * by_hand([16]) / mean) == 3
    assert batching.costs[Length(16)].each == pytest.approx(mean / 1e12)

    class ByClass(PacksTask):
        def sample_work(self, sample: ListedSample) -> Work:
            return self.work(sample.shape)

    ByClass.packs = packs
    plain = ByClass(PacksConfig(**tree))
    assert plain.batching(place()).share is None and plain.batching(place()).sizes[Length(16)] == 2
    message = plain.data(place()).resume(task.data(place()).state(0))
    assert message is not None and message.startswith("batches or stages differ from those")


def test_a_step_s_work_and_tokens_are_those_of_its_packs() -> None:
    packs = {16: [[16], [2] * 6], 8: [[3, 2]]}
    task = make(packs, batching={"mix": "window"})
    results = []
    for step in task.data(place()).steps(0, 2):
        usage = task.usage(step)
        results.append((usage.items, usage.tokens, usage.forward.products, usage.forward.attention))
    total = [sum(column) for column in zip(*results, strict=True)]
    squares = 16**2 + 6 * 2**2 + 3**2 + 2**2
    per_epoch = [3, 33, A * 33, B * squares]
    assert total == [len(results) * number for number in per_epoch] or total == per_epoch


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_a_cost_that_is_none_is_refused(bad: float) -> None:
    class Wrong(PacksTask):
        packs: ClassVar[Mapping[int, Sequence[Sequence[int]]]] = {16: [[16], [8, 8]]}

        def sample_work(self, sample: ListedSample) -> Work:
            return Work(bad if sample.name.startswith("001") else 1.0)

    with pytest.raises(UserError, match="001 of 16: a sample's cost is a number of FLOPs above zero, not"):
        Wrong(PacksConfig()).data(place())
