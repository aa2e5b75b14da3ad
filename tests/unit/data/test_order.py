"""Position and resume of a run: elastic resume, stages, shares of data sets, changed data; and the balance of steps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import Batching, BatchSampler
from mmspeed.data.cache.keys import digest
from mmspeed.data.sampling.assignment import Cost, assignment_load
from mmspeed.data.sampling.forecast import forecast
from mmspeed.data.sampling.order import Order, TrainingStage
from mmspeed.data.sampling.rank_batches import bucket_batches_of
from mmspeed.data.sampling.schedule import BucketSupply, partition_epoch, shuffle
from mmspeed.errors import UserError
from mmspeed.rng import stream
from mmspeed.shapes import Bucket
from tests.unit.data.test_sampler import BUCKETS, batchings, counts, make_samples


def drawn(sampler: BatchSampler, start: int, epoch: int) -> tuple[Counter[tuple[str, int, int]], int]:
    """All uses of an epoch from a step on, and the step behind them."""
    results: Counter[tuple[str, int, int]] = Counter()
    while sampler.locate(start).epoch == epoch:
        results.update(draw.name for draw in sampler.draws(start))
        start += 1
    return results, start


@settings(max_examples=50, deadline=None)
@given(
    counts,
    st.lists(batchings, min_size=1, max_size=4),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(1, 2),
)
def test_resume_anywhere_with_any_batching(
    sizes: list[int], chain: list[Batching], stops: list[int], repeats: int
) -> None:
    """Stopped after some steps and resumed with another batching (world size, budget, group), again and again: each use once."""
    samples = make_samples(*sizes)
    step, state = 0, None
    met: dict[int, Counter[tuple[str, int, int]]] = {}
    for batching, steps in zip(chain, stops, strict=False):
        sampler = BatchSampler(samples, batching, seed=5, stages=[TrainingStage(repeats=repeats)])
        if state is not None:
            sampler.resume(json.loads(json.dumps(state)))
        for _ in range(steps):
            met.setdefault(sampler.locate(step).epoch, Counter()).update(draw.name for draw in sampler.draws(step))
            step += 1
        state = sampler.state(step)
    epoch = sampler.locate(step).epoch
    rest, after = drawn(sampler, step, epoch)
    met.setdefault(epoch, Counter()).update(rest)
    whole, _ = drawn(sampler, after, epoch + 1)
    met[epoch + 1] = whole
    for number, uses in met.items():
        assert uses == Counter((sample.key, number, repeat) for sample in samples for repeat in range(repeats))


@settings(max_examples=30, deadline=None)
@given(counts, batchings, st.integers(0, 30), st.integers(0, 30))
def test_resume_with_the_same_batching_is_the_same_run(
    sizes: list[int], batching: Batching, first: int, second: int
) -> None:
    """Also after an elastic resume in the middle of an epoch, and a stop after that."""
    samples = make_samples(*sizes)
    start = BatchSampler(samples, replace(batching, slots=batching.slots + 1), seed=5)
    other = BatchSampler(samples, batching, seed=5)
    other.resume(start.state(first))
    again = BatchSampler(samples, batching, seed=5)
    assert again.resume(json.loads(json.dumps(other.state(first + second)))) is None
    for step in range(first + second, first + second + 12):
        assert again.draws(step) == other.draws(step)


def test_a_state_is_a_few_numbers_and_the_changes_are_reported() -> None:
    samples = make_samples(20, 9, 7)
    sampler = BatchSampler(samples, 4, seed=0)
    state = sampler.state(5)
    assert len(json.dumps(state)) < 1000 and sum(state["position"]["used"].values()) <= 20
    assert BatchSampler(samples, 4, seed=0).resume(state) is None
    notice = BatchSampler(samples, 3, seed=0).resume(state)
    left = 36 - sum(state["position"]["used"].values())
    assert notice is not None and f"the {left} of 36 uses that are left of epoch 0" in notice
    grown = BatchSampler([*samples, *make_samples(0, 0, 0, 2)], 4, seed=0)
    notice = grown.resume(state)
    assert notice is not None and "bucket 49x64x64: 0 samples, now 2" in notice and "a new epoch begins" in notice
    assert grown.locate(5) == (0, 1, 0)
    assert drawn(grown, 5, 1)[0].total() == 38
    swapped = BatchSampler([*samples[1:], replace(samples[0], key="other")], 4, seed=0)
    assert "other samples" in (swapped.resume(state) or "")
    with pytest.raises(IndexError, match="begins at 5"):
        grown.draws(4)


IMAGES = TrainingStage(3, takes=lambda bucket: bucket.is_image)
SHORT = TrainingStage(4, takes=lambda bucket: bucket.frames <= 17)


def test_stages_follow_each_other_and_no_use_has_the_name_of_another() -> None:
    samples = make_samples(9, 6, 0, 5)
    sampler = BatchSampler(samples, 4, seed=1, stages=[IMAGES, SHORT, TrainingStage()])
    steps = [sampler.draws(step) for step in range(30)]
    frames = [{draw.sample.bucket.frames for draw in step} for step in steps]
    assert all(f == {1} for f in frames[:3]) and all(f <= {1, 17} for f in frames[3:7])
    assert any(49 in f for f in frames[7:14])
    named = Counter(draw.name for step in steps for draw in step)
    assert max(named.values()) == 1, "the same noise twice"
    places = [sampler.locate(step) for step in range(30)]
    assert [place.stage for place in places] == [0] * 3 + [1] * 4 + [2] * 23
    assert places[3].at == 0 and places[7].at == 0 and places[7].epoch == places[6].epoch + 1
    assert sampler.first_pass == 7 + sampler.whole_epoch(2)[0].steps
    last = Counter(draw.sample.key for step in steps[7 : sampler.first_pass] for draw in step)
    assert last == Counter(sample.key for sample in samples)


@settings(max_examples=30, deadline=None)
@given(batchings, batchings, st.integers(0, 25))
def test_stages_resume_anywhere(first: Batching, second: Batching, stop: int) -> None:
    samples, stages = make_samples(9, 6, 3, 5), [IMAGES, SHORT, TrainingStage()]
    one = BatchSampler(samples, first, seed=1, stages=stages)
    met = Counter(draw.name for step in range(stop) for draw in one.draws(step))
    two = BatchSampler(samples, second, seed=1, stages=stages)
    two.resume(one.state(stop))
    epoch = one.locate(stop).epoch
    assert two.locate(stop) == (one.locate(stop).stage, epoch, 0 if two.origin.step == stop else one.locate(stop).at)
    for step in range(stop, stop + 30):
        met.update(draw.name for draw in two.draws(step))
        assert {draw.sample.bucket.is_image for draw in two.draws(step)} == {True} or step >= 3
    assert max(met.values()) == 1


def test_what_changes_elsewhere_in_the_curriculum_leaves_the_epoch_whole() -> None:
    """The end of training and the stages before and after do not change the rest of this stage's epoch."""
    samples = make_samples(9, 6, 3, 5)
    state = BatchSampler(samples, 4, seed=1, stages=[IMAGES, TrainingStage(20), SHORT, TrainingStage(50)]).state(6)
    assert (
        BatchSampler(samples, 4, seed=1, stages=[IMAGES, TrainingStage(20), SHORT, TrainingStage()]).resume(state)
        is None
    )
    first = BatchSampler(samples, 4, seed=1, stages=[IMAGES, TrainingStage(20), SHORT, TrainingStage(50)])
    met = Counter(draw.name for step in range(3, 6) for draw in first.draws(step))
    for stages in (
        [IMAGES, TrainingStage(30), TrainingStage()],
        [replace(IMAGES, steps=2), TrainingStage()],
        [TrainingStage()],
    ):
        other = BatchSampler(samples, 4, seed=1, stages=stages)
        notice = other.resume(json.loads(json.dumps(state)))
        assert notice is not None and f"the {23 - met.total()} of 23 uses that are left of epoch 1" in notice
        assert met + drawn(other, 6, 1)[0] == Counter((sample.key, 1, 0) for sample in samples)
    gone = BatchSampler(samples, 4, seed=1, stages=[replace(IMAGES, steps=9), TrainingStage()])
    assert "another curriculum" in (gone.resume(state) or "") and gone.locate(6) == (0, 2, 0)


def test_repeats_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(UserError, match="lower the repeats"):
        BatchSampler(make_samples(10), 4, seed=0, stages=[TrainingStage(repeats=10**9)])


def test_shares_of_data_sets_hold_in_every_epoch_and_stage() -> None:
    samples = [*make_samples(90, 30, dataset="web"), *make_samples(10, 0, 5, dataset="own")]
    even = TrainingStage(weights={"web": 1.0, "own": 1.0})
    sampler = BatchSampler(samples, 5, seed=0, stages=[even])
    length, often = sampler.steps_per_epoch, Counter[str]()
    for epoch in range(6):
        draws = [draw for step in range(epoch * length, (epoch + 1) * length) for draw in sampler.draws(step)]
        sets = Counter(draw.sample.dataset for draw in draws)
        assert sets["own"] == pytest.approx(sets["web"], abs=2) and len({d.name for d in draws}) == len(draws)
        often.update(draw.sample.key for draw in draws)
    web = [often[sample.key] for sample in samples if sample.dataset == "web"]
    assert max(web) - min(web) <= 1 and sum(web) == pytest.approx(6 * 135 / 2, abs=6)
    only = BatchSampler(
        samples, 5, seed=0, stages=[TrainingStage(2, weights={"own": 1.0}), TrainingStage(repeats={"own": 3})]
    )
    assert {draw.sample.dataset for step in (0, 1) for draw in only.draws(step)} == {"own"}
    assert only.uses(1) == 120 + 3 * 15


def test_every_full_step_costs_all_slots_the_same() -> None:
    supplies = [
        BucketSupply(1000, 16, Cost(0.5, 1.0), 8),
        BucketSupply(300, 4, Cost(0.5, 4.1), 8),
        BucketSupply(77, 1, Cost(0.5, 15.9), 8),
    ]
    for mix, tolerance in (("same", 0.0), ("matched", 0.05)):
        division = partition_epoch(supplies, mix, tolerance)  # type: ignore[arg-type]
        plan = shuffle(division, stream(0, "test"))
        assert plan.steps == division.steps
        costs = []
        for step in range(plan.steps):
            costs.append(
                {round(supplies[bucket].cost.of(supplies[bucket].batch), 3) for bucket, _, _ in plan.pieces(step)}
            )
        spread = [min(c) / max(c) for c in costs]
        assert sum(value < 1 - tolerance - 1e-9 for value in spread) <= len(division.tail)


def test_a_large_set_is_balanced_on_a_large_world() -> None:
    """The simulation's result for a million clips holds for thirty thousand, where tails count more."""
    world = 64
    buckets = [Bucket(f, h, w) for f in (1, 17, 49, 97) for h, w in ((256, 256), (288, 512), (512, 288), (480, 848))]
    each = {bucket: Cost(0.0, float(bucket.frames * bucket.height * bucket.width) ** 1.2) for bucket in buckets}
    budget = max(cost.each for cost in each.values())
    counts_ = np.random.default_rng(0).multinomial(30_000, np.random.default_rng(1).dirichlet(np.ones(len(buckets))))
    groups = {(bucket, ""): np.arange(count) for bucket, count in zip(buckets, counts_, strict=True)}
    batching = Batching(world, {bucket: each[bucket].fitting(budget) for bucket in buckets}, each)
    order = Order(groups, batching, seed=0)
    plan, numbered = order.whole_epoch()
    prediction = forecast(plan, numbered, batching, world, order.uses(), lambda bucket: bucket.frames)
    assert prediction.lockstep.mean() < 1.02 and prediction.unmet == 0 and prediction.samples == 30_000
    alone = []
    for step in range(plan.steps):  # the forecast against dealing every step again
        load = assignment_load(
            bucket_batches_of([(numbered[b], count) for b, _, count in plan.pieces(step)], batching), world
        )
        alone.append(load.imbalance)
    assert prediction.lockstep.tolist() == pytest.approx(alone)
    assert prediction.tokens == sum(int(n) * b.frames for n, b in zip(counts_, buckets, strict=True))
    assert (
        prediction.epoch_imbalance >= 1.0
        and 0 <= prediction.idle < 0.05 * prediction.rows.sum() * world
        and prediction.short <= prediction.steps
    )


def test_a_bucket_of_nearly_free_samples_is_divided() -> None:
    """Such a cost comes from a measurement whose times do not rise with the batch."""
    supplies = [BucketSupply(100, 7, Cost(0.5, 1e-9), 2), BucketSupply(90, 3, Cost(0.5, 0.1), 2)]
    for mix in ("same", "matched", "window"):
        plan = shuffle(partition_epoch(supplies, mix, 0.0), stream(0, "test"))  # type: ignore[arg-type]
        assert plan.used(plan.steps, 2) == [100, 90]


def test_groups_halve_the_slots_of_videos() -> None:
    batching = Batching(8, dict.fromkeys(BUCKETS, 2), group=4)
    order = Order({(BUCKETS[0], ""): np.arange(64), (BUCKETS[3], ""): np.arange(64)}, batching, seed=0)
    plan, buckets = order.whole_epoch()
    sizes = {buckets[b].is_image: count for step in range(plan.steps) for b, _, count in plan.pieces(step)}
    assert sizes == {True: 16, False: 4}
    order = Order({(BUCKETS[3], ""): np.arange(64)}, Batching(8, group=4), seed=0)
    assert order.steps_per_epoch == 8, "steps of so many samples are of so many samples, whatever the group"


def test_the_order_is_the_one_that_checkpoints_count_in() -> None:
    """A checkpoint holds how many uses are behind, not which: another torch or numpy must not shuffle otherwise."""
    samples = [*make_samples(40, 30, 20, dataset="web"), *make_samples(9, 0, 5, dataset="own")]
    batching = Batching(3, dict.fromkeys(BUCKETS, 2), mix="window")
    stages = [TrainingStage(weights={"web": 1.0, "own": 1.0})]
    sampler = BatchSampler(samples, batching, seed=7, stages=stages)
    text = json.dumps([[draw.name for draw in sampler.draws(step)] for step in range(40)])
    assert digest(text.encode()) == "73efb612ff2a26a11a292ebd4c3529d2"


def test_an_order_that_was_used_before_resumes_as_a_new_one_does() -> None:
    samples = make_samples(20, 9, 7)
    state = BatchSampler(samples, 4, seed=5).state(5)
    used, fresh = BatchSampler(samples, 3, seed=5), BatchSampler(samples, 3, seed=5)
    used.draws(0)  # plans its epochs from the start
    for sampler in (used, fresh):
        sampler.resume(state)
    for step in range(5, 15):
        assert used.draws(step) == fresh.draws(step) and used.locate(step) == fresh.locate(step)
