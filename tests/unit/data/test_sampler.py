"""The order of training: every use of every sample exactly once an epoch, whatever the batching, and a rank's share of it."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import Batching, BatchSampler, Sample, SampleUse
from mmspeed.data.sampling.assignment import Cost
from mmspeed.data.sampling.order import TrainingStage
from mmspeed.data.sampling.rank_batches import count_present, rank_batches, ranks_of_samples
from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

BUCKETS = (Bucket(1, 64, 64), Bucket(17, 64, 96), Bucket(17, 96, 64), Bucket(49, 64, 64))
Name = tuple[str, int, int]


def make_samples(*counts: int, dataset: str = "") -> list[Sample]:
    """Samples in each bucket, by these counts."""
    return [
        Sample(f"{bucket.name}-{n}{dataset}", ("l",), ("t",), "train", bucket, f"{n}.mp4", dataset=dataset)
        for bucket, count in zip(BUCKETS, counts, strict=False)
        for n in range(count)
    ]


def epoch_draws(sampler: BatchSampler, epoch: int) -> list[list[SampleUse]]:
    length = sampler.steps_per_epoch
    return [sampler.draws(step) for step in range(epoch * length, (epoch + 1) * length)]


def names(steps: list[list[SampleUse]]) -> list[list[Name]]:
    return [[draw.name for draw in step] for step in steps]


counts = st.lists(st.integers(0, 25), min_size=4, max_size=4).filter(any)
batchings = st.builds(
    lambda slots, sizes, fixed, mix, group_of, most: Batching(
        slots,
        dict(zip(BUCKETS, sizes, strict=True)),
        {bucket: Cost(fixed, bucket.frames * bucket.height * bucket.width / 4096) for bucket in BUCKETS},
        mix,
        0.1,
        group_of[0],
        most,
        group_of[1],
    ),
    st.integers(1, 12),
    st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2)),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from(["same", "matched", "window"]),
    st.sampled_from(
        [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]
    ),  # ranks of a group, and how many of them are tensor-parallel
    st.none() | st.integers(1, 6),
)


@settings(max_examples=80, deadline=None)
@given(counts, batchings, st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**32))
def test_each_use_exactly_once_an_epoch(
    sizes: list[int], batching: Batching, repeats: int, epoch: int, seed: int
) -> None:
    samples = make_samples(*sizes)
    sampler = BatchSampler(samples, batching, seed, [TrainingStage(repeats=repeats)])
    steps = epoch_draws(sampler, epoch)
    assert all(steps), "a step without a sample"
    used = Counter(draw.name for step in steps for draw in step)
    assert used == Counter((sample.key, epoch, repeat) for sample in samples for repeat in range(repeats))
    for step in steps:
        pieces = [(bucket, len(list(group))) for bucket, group in itertools.groupby(step, lambda d: d.sample.bucket)]
        assert len({bucket for bucket, _ in pieces}) == len(pieces), "a bucket's draws stand together"
        slots = sum(-(-n // batching.sizes[bucket]) / batching.supply(bucket, 1).slots for bucket, n in pieces)
        assert slots <= 1 + 1e-9, "more device batches than a step has"


@settings(max_examples=80, deadline=None)
@given(counts, st.integers(1, 9))
def test_steps_of_a_number_of_samples(sizes: list[int], batch_size: int) -> None:
    """Full steps, most of one bucket; in the last ones buckets of like cost fill each other up."""
    sampler = BatchSampler(make_samples(*sizes), batch_size, seed=3)
    steps = [Counter(draw.sample.bucket for draw in step) for step in epoch_draws(sampler, 0)]
    assert all(step.total() <= batch_size for step in steps)
    assert sum(step.total() < batch_size for step in steps) <= sum(map(bool, sizes))
    assert sum(len(step) > 1 for step in steps) <= sum(map(bool, sizes))
    assert sum(sizes) / batch_size <= len(steps) <= sum(-(-size // batch_size) for size in sizes)
    assert all(len(step) == 1 for step in steps if BUCKETS[0] in step), "an image costs far less than a video"


@settings(max_examples=80, deadline=None)
@given(counts, batchings, st.integers(1, 9), st.integers(0, 3))
def test_ranks_share_a_step(sizes: list[int], batching: Batching, lanes: int, seed: int) -> None:
    world = lanes * batching.group
    sampler = BatchSampler(make_samples(*sizes), batching, seed)
    for draws in epoch_draws(sampler, 0)[:4]:
        parts = [rank_batches(draws, batching, rank, world) for rank in range(world)]
        assert len({len(part) for part in parts}) == 1, "ranks would wait for each other for ever"
        weights: dict[Name, float] = defaultdict(float)
        for rank, part in enumerate(parts):
            for micro in part:
                bucket = micro[0][0].sample.bucket
                assert all(draw.sample.bucket == bucket for draw, _ in micro), "two shapes in one batch"
                assert 1 <= len(micro) <= min(batching.sizes[bucket], batching.most or 99)
                ranks = batching.ranks(bucket)
                assert {weight for _, weight in micro} in ({1 / ranks}, {0.0})
                for draw, weight in micro:
                    weights[draw.name] += weight
            leader = rank // batching.group * batching.group
            videos = [[pair for pair in micro if pair[1]] for micro in part if not micro[0][0].sample.bucket.is_image]
            same = [[pair for pair in m if pair[1]] for m in parts[leader] if not m[0][0].sample.bucket.is_image]
            assert [m for m in videos if m] == [m for m in same if m], "ranks of a group meet the same videos"
        assert weights == pytest.approx({draw.name: 1.0 for draw in draws})
        met = Counter((draw.name, rank) for draw, ranks in ranks_of_samples(draws, batching, world) for rank in ranks)
        held = {(d.name, rank) for rank, part in enumerate(parts) for micro in part for d, w in micro if w}
        assert set(met) == held and max(met.values()) == 1


def test_images_are_not_split_over_a_group() -> None:
    """4 ranks in groups of 2: a video is met by both ranks of a group, an image by one rank alone, never beside a video."""
    sizes = dict.fromkeys(BUCKETS, 1)
    batching = Batching(4, sizes, group=2, mix="window")
    images = BatchSampler(make_samples(8), batching, seed=0).draws(0)
    videos = BatchSampler(make_samples(0, 4), batching, seed=0).draws(0)
    assert len(images) == 4 and len(videos) == 2
    own = [rank_batches(images, batching, rank, 4) for rank in range(4)]
    assert [[weight for _, weight in micro] for part in own for micro in part] == [[1.0]] * 4
    assert len({part[0][0][0].name for part in own}) == 4
    pairs = [rank_batches(videos, batching, rank, 4) for rank in range(4)]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3] and pairs[0][0][0][1] == 0.5
    mixed = [rank_batches([*images, *videos], batching, rank, 4) for rank in range(4)]
    rows = [{micro[0][0].sample.bucket.is_image for micro in row} for row in zip(*mixed, strict=True)]
    assert rows == [{False}, {True}], "in a row all ranks exchange or none does"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=20).filter(lambda lost: not all(lost)),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.integers(0, 20),
)
def test_lost_draws_are_replaced_with_weight_0(lost: list[bool], world: int, micro: int | None, images: int) -> None:
    samples = make_samples(min(images, len(lost) - 1), len(lost))[-len(lost) :]
    draws = [SampleUse(replace(sample, lost=gone), 0, 0) for sample, gone in zip(samples, lost, strict=True)]
    bare = [SampleUse(replace(draw.sample, lost=False), 0, 0) for draw in draws]
    batching = Batching(1, most=micro)
    weights: Counter[Name] = Counter()
    for rank in range(world):
        parts = rank_batches(draws, batching, rank, world)
        assert len(parts) == len(rank_batches(bare, batching, rank, world))
        for part in parts:
            assert part and not any(draw.sample.lost for draw, _ in part)
            assert len({draw.sample.bucket for draw, _ in part}) == 1
            weights.update(draw.name for draw, weight in part if weight)
    assert weights == Counter(draw.name for draw in draws if not draw.sample.lost)
    assert count_present(draws) == weights.total()


@pytest.mark.parametrize("lost", [False, True])
def test_idle_ranks_of_images_are_not_given_a_video(lost: bool) -> None:
    """A video's ranks exchange: were one of them to meet it while the other has an image, they would wait for ever."""
    cheap_video = {bucket: Cost(0.0, 1.0 if bucket.is_image else 0.1) for bucket in BUCKETS}
    batching = Batching(4, dict.fromkeys(BUCKETS, 1), cheap_video, group=2)
    images, videos = make_samples(3), make_samples(0, 2)
    images[0] = replace(images[0], lost=lost)
    draws = [SampleUse(sample, 0, 0) for sample in [*images, *videos]]
    rows = zip(*[rank_batches(draws, batching, rank, 4) for rank in range(4)], strict=True)
    assert [{micro[0][0].sample.bucket.is_image for micro in row} for row in rows] == [{False}, {True}]


def test_share_refuses_nonsense() -> None:
    draws = BatchSampler(make_samples(4), 4, seed=0).draws(0)
    plain = Batching(4)
    for bad in [([], plain, 0, 1), (draws, plain, 2, 2), (draws, plain, -1, 2), (draws, replace(plain, group=2), 0, 3)]:
        with pytest.raises(ValueError, match="no micro-batches"):
            rank_batches(*bad)
    with pytest.raises(ValueError, match="every draw of this step is lost"):
        rank_batches([SampleUse(replace(draw.sample, lost=True), 0, 0) for draw in draws], plain, 0, 1)


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


@pytest.mark.parametrize("mix", ["same", "window"])
def test_steps_of_buckets_are_mixed(mix: str) -> None:
    sampler = BatchSampler(make_samples(0, 64, 64), replace(Batching(2), mix=mix), seed=0)
    order = [{draw.sample.bucket for draw in step} for step in epoch_draws(sampler, 0)]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 16  # 32 expected of 63; blocks would have 1
    assert any(len(buckets) == 2 for buckets in order) == (mix != "same")


def test_repeats_are_shuffled_among_samples() -> None:
    sampler = BatchSampler(make_samples(50), 10, seed=0, stages=[TrainingStage(repeats=4)])
    first_half = [draw.sample.key for step in epoch_draws(sampler, 0)[:10] for draw in step]
    assert max(Counter(first_half).values()) >= 3 and {draw.repeat for draw in sampler.draws(0)} != {0}


def test_fingerprints_tell_data_from_batching() -> None:
    samples = make_samples(5, 3)
    base = BatchSampler(samples, 2, seed=0)
    assert BatchSampler(samples[::-1], 2, seed=9).fingerprint == base.fingerprint
    other_samples = [BatchSampler(samples[1:], 2, seed=0), BatchSampler([*samples, *make_samples(0, 0, 1)], 2, seed=0)]
    assert len({base.fingerprint, *(other.fingerprint for other in other_samples)}) == 3
    other_uses = [
        *other_samples,
        BatchSampler(samples, 2, seed=0, stages=[TrainingStage(repeats=2)]),
        BatchSampler(
            samples, 2, seed=0, stages=[TrainingStage(4, takes=lambda bucket: bucket.is_image), TrainingStage()]
        ),
        BatchSampler(make_samples(5, 3, dataset="b"), 2, seed=0),
    ]
    assert len({base.data_fingerprint(0), *(other.data_fingerprint(0) for other in other_uses)}) == 6
    other_order = [
        BatchSampler(samples, 3, seed=0),
        BatchSampler(samples, Batching(2, {BUCKETS[0]: 3}), seed=0),
        BatchSampler(samples, Batching(2, costs={BUCKETS[0]: Cost(1.0, 2.0)}), seed=0),
        BatchSampler(samples, Batching(2, mix="window"), seed=0),
        BatchSampler(samples, Batching(4, dict.fromkeys(BUCKETS, 1), group=2), seed=0),
        BatchSampler(samples, 2, seed=0, stages=[TrainingStage(4), TrainingStage()]),
    ]
    # steps of so many samples are the same however many ranks compute a video together
    assert BatchSampler(samples, Batching(2, group=2), seed=0).order_fingerprint == base.order_fingerprint
    assert {other.data_fingerprint(0) for other in other_order} == {base.data_fingerprint(0)}
    assert len({base.order_fingerprint, *(other.order_fingerprint for other in other_order)}) == 7
    # neither how many samples are computed at a time, nor where training ends, changes a step
    for same in (Batching(2, most=1), Batching(2)):
        stages = [TrainingStage(None if same.most else 7)]
        assert BatchSampler(samples, same, seed=0, stages=stages).order_fingerprint == base.order_fingerprint


def test_no_samples_is_an_error_for_people() -> None:
    with pytest.raises(UserError, match="no training samples"):
        BatchSampler([], 2, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        BatchSampler(make_samples(2), 0, seed=0)
    with pytest.raises(ValueError, match="distinct"):
        BatchSampler(make_samples(2) * 2, 2, seed=0)
    with pytest.raises(UserError, match="stage 2 has no training sample"):
        BatchSampler(
            make_samples(2), 1, seed=0, stages=[TrainingStage(3), TrainingStage(takes=lambda bucket: bucket.frames > 1)]
        )


@settings(max_examples=60, deadline=None)
@given(counts, batchings, batchings, st.integers(0, 2**32), st.data())
def test_what_is_left_out_stays_so_in_any_batches(
    sizes: list[int], before: Batching, after: Batching, seed: int, data: st.DataObject
) -> None:
    samples = make_samples(*sizes)
    sampler, length = BatchSampler(samples, before, seed), BatchSampler(samples, before, seed).steps_per_epoch
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first, length - 1))
    at = data.draw(st.integers(0, first))  # the checkpoint that a roll-back goes to
    planned = names(epoch_draws(sampler, 0))
    saved = json.loads(json.dumps(sampler.state(at)))
    gone = {draw.name for draw in sampler.leave_out(range(first, last + 1))}
    assert gone == {name for step in planned[first : last + 1] for name in step}
    assert sampler.leave_out(range(first, last + 1)) == []
    sampler.resume(saved)
    assert names(epoch_draws(sampler, 0)) == planned  # places stay
    other = BatchSampler(samples, after, seed)
    other.resume(json.loads(json.dumps(sampler.state(at))))
    step, rest = at, list[SampleUse]()
    while other.locate(step).epoch == 0:
        rest += other.draws(step)
        step += 1
    assert Counter(draw.name for draw in rest) == Counter(name for names_ in planned[at:] for name in names_)
    assert {draw.name for draw in rest if draw.lost} == gone
    assert not any(draw.lost for draw in other.draws(step))  # the next epoch has all
