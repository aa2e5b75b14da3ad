"""The order of training: every use of every sample exactly once an epoch, one bucket a step, at any world size."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import BatchSampler, Draw, Sample, count_present, micro_batches
from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

BUCKETS = (Bucket(1, 64, 64), Bucket(17, 64, 96), Bucket(49, 64, 64))


def make_samples(*counts: int) -> list[Sample]:
    """So many samples in each bucket."""
    return [
        Sample(f"{bucket.name}-{n}", ("l",), ("t",), "train", bucket, f"{n}.mp4")
        for bucket, count in zip(BUCKETS, counts, strict=False)
        for n in range(count)
    ]


def epoch_draws(sampler: BatchSampler, epoch: int) -> list[list[Draw]]:
    return [sampler.step(epoch, index) for index in range(sampler.steps_per_epoch)]


def names(steps: list[list[Draw]]) -> list[list[tuple[str, int, int]]]:
    return [[draw.name for draw in step] for step in steps]


counts = st.lists(st.integers(0, 13), min_size=3, max_size=3).filter(any)


@settings(max_examples=80, deadline=None)
@given(counts, st.integers(1, 9), st.integers(1, 3), st.integers(0, 5))
def test_each_use_exactly_once_an_epoch(sizes: list[int], batch_size: int, repeats: int, epoch: int) -> None:
    samples = make_samples(*sizes)
    sampler = BatchSampler(samples, batch_size, seed=3, repeats=repeats)
    steps = epoch_draws(sampler, epoch)
    used = Counter(draw.name for step in steps for draw in step)
    assert used == Counter((sample.key, epoch, repeat) for sample in samples for repeat in range(repeats))
    assert all(1 <= len(step) <= batch_size for step in steps)
    assert all(len({draw.sample.bucket for draw in step}) == 1 for step in steps)
    assert len(steps) == sum(-(-size * repeats // batch_size) for size in sizes)
    short = Counter(step[0].sample.bucket for step in steps if len(step) < batch_size)
    assert all(count == 1 for count in short.values())


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 7))
def test_ranks_share_a_step(size: int, world: int, micro: int | None) -> None:
    sampler = BatchSampler(make_samples(size), size, seed=0)
    draws = sampler.step(0, 0)
    parts = [micro_batches(draws, rank, world, micro) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1, "ranks would wait for each other for ever"
    weights: dict[tuple[str, int, int], float] = defaultdict(float)
    for part in parts:
        for micro_batch in part:
            assert 1 <= len(micro_batch) <= (micro or size)
            assert {weight for _, weight in micro_batch} in ({1.0}, {0.0})
            for draw, weight in micro_batch:
                weights[draw.name] += weight
    assert weights == {draw.name: 1.0 for draw in draws}
    assert len(parts[0]) == math.ceil(math.ceil(size / world) / (micro or size))
    for rank, part in enumerate(parts):
        own = [draw for micro_batch in part for draw, weight in micro_batch if weight]
        assert own == draws[rank::world]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=20).filter(lambda lost: not all(lost)),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
)
def test_lost_draws_are_replaced_with_weight_0(lost: list[bool], world: int, micro: int | None) -> None:
    draws = [Draw(replace(sample, lost=gone), 0, 0) for sample, gone in zip(make_samples(len(lost)), lost, strict=True)]
    bare = [Draw(replace(draw.sample, lost=False), 0, 0) for draw in draws]
    weights: Counter[tuple[str, int, int]] = Counter()
    for rank in range(world):
        parts = micro_batches(draws, rank, world, micro)
        assert [len(part) for part in parts] == [len(part) for part in micro_batches(bare, rank, world, micro)]
        for part in parts:
            assert not any(draw.sample.lost for draw, _ in part)
            own = {draw.name for draw, weight in part if weight}
            assert not own or all(draw.name in own for draw, weight in part if not weight)
            weights.update(draw.name for draw, weight in part if weight)
    assert weights == Counter(draw.name for draw in draws if not draw.sample.lost)
    assert count_present(draws) == weights.total()


def test_the_nearest_draw_stands_in_for_a_lost_one() -> None:
    samples = make_samples(6)
    draws = [Draw(replace(s, lost=place in (0, 1, 3)), 0, 0) for place, s in enumerate(samples)]
    (whole,) = micro_batches(draws, 0, 1, None)
    assert [(draws.index(draw), weight) for draw, weight in whole] == [(2, 0), (2, 0), (2, 1), (2, 0), (4, 1), (5, 1)]
    assert micro_batches(draws, 0, 1, 2)[0] == [(draws[2], 0.0)] * 2  # a micro-batch that is lost as a whole
    with pytest.raises(ValueError, match="no draw of this step"):
        micro_batches(draws[:2], 0, 1, None)


def test_micro_batches_refuses_nonsense() -> None:
    draws = BatchSampler(make_samples(4), 4, seed=0).step(0, 0)
    for bad in [([], 0, 1, None), (draws, 2, 2, None), (draws, -1, 2, None), (draws, 0, 1, 0)]:
        with pytest.raises(ValueError, match="no micro-batches"):
            micro_batches(*bad)


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    samples = make_samples(20, 11)
    sampler = BatchSampler(samples, 4, seed=1)
    first = names(epoch_draws(sampler, 0))
    for epoch in (3, 1, 2):  # visits of other epochs leave no trace
        epoch_draws(sampler, epoch)
    assert names(epoch_draws(sampler, 0)) == first
    assert names(epoch_draws(BatchSampler(samples[::-1], 4, seed=1), 0)) == first
    assert names(epoch_draws(BatchSampler(samples, 4, seed=2), 0)) != first

    def keys(epoch: int) -> list[list[str]]:
        return [[draw.sample.key for draw in step] for step in epoch_draws(sampler, epoch)]

    def members(epoch: int) -> set[frozenset[str]]:
        return {frozenset(step) for step in keys(epoch)}

    assert keys(0) != keys(1)
    assert members(0) != members(1), "new company each epoch, not just a new order of the same steps"


def test_steps_of_buckets_are_mixed() -> None:
    sampler = BatchSampler(make_samples(64, 64), 2, seed=0)
    order = [step[0].sample.bucket for step in epoch_draws(sampler, 0)]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 16  # 32 expected of 63; blocks would have 1


def test_repeats_are_shuffled_among_samples() -> None:
    sampler = BatchSampler(make_samples(50), 10, seed=0, repeats=4)
    first_half = [draw.sample.key for step in epoch_draws(sampler, 0)[:10] for draw in step]
    assert max(Counter(first_half).values()) >= 3 and {draw.repeat for draw in sampler.step(0, 0)} != {0}


def test_locate_counts_whole_epochs() -> None:
    sampler = BatchSampler(make_samples(5, 3), 2, seed=0)
    assert sampler.steps_per_epoch == 5
    assert [sampler.locate(step) for step in (0, 4, 5, 12)] == [(0, 0), (0, 4), (1, 0), (2, 2)]
    for index in (-1, 5):
        with pytest.raises(IndexError, match="0 to 4"):
            sampler.step(0, index)


def test_a_small_bucket_still_has_its_steps() -> None:
    sampler = BatchSampler(make_samples(1, 2), 64, seed=0)
    assert sorted(len(step) for step in epoch_draws(sampler, 0)) == [1, 2]


def test_fingerprint_tells_what_changed() -> None:
    samples = make_samples(5, 3)
    base = BatchSampler(samples, 2, seed=0).fingerprint
    assert BatchSampler(samples[::-1], 2, seed=9).fingerprint == base
    others = [
        BatchSampler(samples[1:], 2, seed=0),
        BatchSampler(samples, 3, seed=0),
        BatchSampler(samples, 2, seed=0, repeats=2),
    ]
    assert base not in {other.fingerprint for other in others} and len({other.fingerprint for other in others}) == 3


def test_no_samples_is_an_error_for_people() -> None:
    with pytest.raises(UserError, match="no training samples"):
        BatchSampler([], 2, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        BatchSampler(make_samples(2), 0, seed=0)
    with pytest.raises(ValueError, match="distinct"):
        BatchSampler(make_samples(2) * 2, 2, seed=0)
