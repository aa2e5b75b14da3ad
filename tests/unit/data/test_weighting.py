"""Weights of steps: each sample or token counts alike in an epoch, by any batching and after any resume; shares of buckets."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.config.training import Weighting
from mmspeed.data import Batching, BatchSampler
from mmspeed.data.sampling.order import TrainingStage
from mmspeed.data.sampling.weighting import StepWeights, gradient_shares
from mmspeed.errors import UserError
from mmspeed.protocols import ShapeClass
from tests.unit.data.test_sampler import BUCKETS, batchings, counts, make_samples

WEIGHTINGS: tuple[Weighting, ...] = ("step", "sample", "token")


def tokens(bucket: ShapeClass) -> float:
    return bucket.numbers / 4096


def factors(sampler: BatchSampler, step: int, weighting: Weighting) -> dict[ShapeClass, Counter[float]]:
    """The factor of each sample's gradient in a step, by bucket: its part of the step's mean, times the weight."""
    drawn = Counter(draw.sample.bucket for draw in sampler.draws(step))
    samples, size = drawn.total(), sum(count * tokens(bucket) for bucket, count in drawn.items())
    weight = StepWeights(weighting, sampler, tokens).weight(step, samples, size)
    results: dict[ShapeClass, Counter[float]] = {}
    for bucket, count in drawn.items():
        part = tokens(bucket) / size if weighting == "token" else 1 / samples
        results[bucket] = Counter({weight * part: count})
    return results


@settings(max_examples=40, deadline=None)
@given(
    counts,
    st.lists(batchings, min_size=1, max_size=4),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.sampled_from(["sample", "token"]),
    st.integers(1, 2),
)
def test_all_count_alike_by_any_batching_and_after_any_resume(
    sizes: list[int], chain: list[Batching], stops: list[int], weighting: Weighting, repeats: int
) -> None:
    """Within an epoch, a token (or sample) has the factor `steps planned at its beginning / tokens of the epoch`."""
    samples = make_samples(*sizes)
    step, state = 0, None
    planned: dict[int, int] = {}  # by epoch
    total = repeats * sum(tokens(sample.bucket) if weighting == "token" else 1.0 for sample in samples)
    for batching, steps in zip(chain, stops, strict=False):
        sampler = BatchSampler(samples, batching, seed=5, stages=[TrainingStage(repeats=repeats)])
        if state is not None:
            sampler.resume(json.loads(json.dumps(state)))
        for _ in range(steps):
            epoch = sampler.locate(step).epoch
            planned.setdefault(epoch, sampler.steps_per_epoch)
            for bucket, actual in factors(sampler, step, weighting).items():
                one = planned[epoch] / total * (tokens(bucket) if weighting == "token" else 1.0)
                assert list(actual) == [pytest.approx(one, rel=1e-12)]
            step += 1
        state = sampler.state(step)


def test_a_stage_has_a_mean_of_its_own_and_an_epoch_begins_again() -> None:
    samples = make_samples(9, 6, 0, 5)
    images = TrainingStage(3, takes=lambda bucket: bucket.is_image)
    sampler = BatchSampler(samples, 4, seed=0, stages=[images, TrainingStage()])
    weights = StepWeights("sample", sampler, tokens)
    assert weights.weight(0, 4, 0.0) == pytest.approx(4 / 3)  # 9 images in 3 steps
    assert weights.weight(3, 4, 0.0) == pytest.approx(4 / (20 / sampler._division(1, ()).steps))
    state = sampler.state(5)
    other = BatchSampler(samples, 7, seed=0, stages=[images, TrainingStage()])
    other.resume(state)
    again = StepWeights("sample", other, tokens)
    assert again.weight(5, 4, 0.0) == weights.weight(5, 4, 0.0)
    later = next(step for step in range(5, 100) if other.locate(step).epoch > sampler.locate(5).epoch)
    assert again.weight(later, 4, 0.0) == pytest.approx(4 / (20 / other._division(1, ()).steps))
    assert again.weight(later, 4, 0.0) != weights.weight(5, 4, 0.0)


def test_a_step_without_tokens_is_an_error_and_one_without_samples_has_the_weight_1() -> None:
    sampler = BatchSampler(make_samples(5), 4, seed=0)
    weights = StepWeights("token", sampler, tokens)
    assert weights.weight(0, 0, 0.0) == 1.0
    with pytest.raises(UserError, match=r"step 1 has no token that counts: use objective\.weighting: sample"):
        weights.weight(0, 4, 0.0)


@settings(max_examples=30, deadline=None)
@given(counts, batchings, st.sampled_from(WEIGHTINGS))
def test_the_shares_of_buckets_are_those_of_their_samples_factors(
    sizes: list[int], batching: Batching, weighting: Weighting
) -> None:
    sampler = BatchSampler(make_samples(*sizes), batching, seed=5)
    sums: defaultdict[ShapeClass, float] = defaultdict(float)
    for step in range(sampler.steps_per_epoch):
        for bucket, actual in factors(sampler, step, weighting).items():
            sums[bucket] += sum(factor * count for factor, count in actual.items())
    plan, buckets = sampler.whole_epoch(0, 0)
    shares = gradient_shares(plan, buckets, weighting, tokens)
    whole = sum(sums.values())
    assert shares == {bucket: pytest.approx(sums[bucket] / whole, rel=1e-9) for bucket in buckets}
    if weighting == "sample":
        assert shares == {
            bucket: pytest.approx(count / sum(sizes)) for bucket, count in zip(BUCKETS, sizes, strict=True) if count
        }
