"""Gradients of whole epochs of training, as the optimizer gets them, against sums of samples by autograd alone (objective.weighting)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmspeed.data import Sample, SampleUse
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from tests.support.character_runs import ALONE, character_config
from tests.support.characters import CharacterDomain
from tests.support.mixed_runs import (
    BY_TOKENS,
    IMAGE,
    IMAGES,
    STILL,
    TOKENS,
    VIDEO,
    VIDEOS,
    mean_gradients,
    mixed_config,
    mixed_home,
    opened_task,
    recorded_gradients,
    sampler_of,
    sums_by_bucket,
    toy_task,
    trained_gradients,
)

SCHEDULES = {
    "accumulated": ("train.batch_size=5", "train.micro_batch_size=2"),
    "same": BY_TOKENS,
    "matched": (*BY_TOKENS, "batching.mix=matched", "batching.accumulate=2"),
    "window": (*BY_TOKENS, "batching.mix=window", "batching.accumulate=4"),
    "slots": (*BY_TOKENS, "batching.slots=3", "train.micro_batch_size=1"),
}
# a sum of some 100 products in another order, in float32: a few eps (1.2e-7) of the largest number
EPS = 3e-6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_home(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def sums(home: Path) -> dict[str, list[np.ndarray]]:
    """The gradient that every schedule must have in the mean over the steps of an epoch, by weighting."""
    by_bucket = sums_by_bucket(mixed_config(home))
    images, videos = ([grad.numpy() for grad in by_bucket[bucket]] for bucket in (IMAGE, VIDEO))
    tokens = TOKENS[IMAGE] * IMAGES + TOKENS[VIDEO] * VIDEOS
    return {
        "sample": [(i + v) / (IMAGES + VIDEOS) for i, v in zip(images, videos, strict=True)],
        "token": [
            (TOKENS[IMAGE] * i + TOKENS[VIDEO] * v) / tokens for i, v in zip(images, videos, strict=True)
        ],
    }  # fmt: skip


def epoch_mean(home: Path, name: str, *overrides: str) -> list[np.ndarray]:
    """The mean gradient of the first epoch of a run."""
    steps = sampler_of(mixed_config(home, *overrides)).steps_per_epoch
    return mean_gradients(trained_gradients(str(home), (f"name={name}", *overrides), steps))


def furthest(actual: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The greatest difference, over the greatest number of the parameter."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(actual, truth, strict=True))


@pytest.mark.parametrize(("weighting", "schedule"), [
        ("sample", "same"), ("sample", "window"), ("token", "accumulated"), ("token", "matched"), ("token", "slots"),
    ],
)  # fmt: skip
def test_the_gradient_of_an_epoch_is_the_same_by_any_schedule(
    home: Path, sums: dict[str, list[np.ndarray]], weighting: str, schedule: str
) -> None:
    actual = epoch_mean(home, f"{weighting}-{schedule}", f"objective.weighting={weighting}", *SCHEDULES[schedule])
    assert furthest(actual, sums[weighting]) < EPS


def test_clipping_leaves_steps_their_weights(home: Path) -> None:
    """A bound far below all gradients leaves of each its direction, as long as the step's weight says."""
    options = (*SCHEDULES["same"], "train.log_every=1")
    steps = sampler_of(mixed_config(home, *options)).steps_per_epoch
    free = trained_gradients(str(home), ("name=free", *options), steps)
    clipped = trained_gradients(str(home), ("name=clipped", *options, "train.clip_norm=1e-3"), steps)
    rows = [row for row in read_metrics(home / "runs" / "clipped" / "metrics.jsonl") if row["kind"] == "train"]
    weights = [row["weight"] for row in rows]
    assert sum(weights) == pytest.approx(steps) and max(weights) > 1.5 * min(weights)
    for row, before, after in zip(rows, free, clipped, strict=True):
        long, short = (float(np.sqrt(sum((grad**2).sum() for grad in grads))) for grads in (before, after))
        assert short == pytest.approx(1e-3 * row["weight"], rel=1e-3)
        assert row["grad_norm"] == pytest.approx(long / row["weight"], rel=1e-5)  # of the step's own mean


def test_a_lost_sample_takes_nothing_from_the_others_weights(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, place = opened_task(mixed_config(home))
    data = task.data(place)
    steps = data.sampler.steps_per_epoch
    whole = [(step.weight, dict(step.divisors)) for step in data.steps(0, steps)]
    broken = next(number for number, (_, divisors) in enumerate(whole) if divisors["samples"] == 3)
    gone, draws = data.sampler.draws(broken)[0].sample.key, data.sampler.draws

    def with_a_loss(number: int) -> list[SampleUse[Sample]]:
        return [
            replace(draw, sample=replace(draw.sample, lost=True)) if draw.sample.key == gone else draw
            for draw in draws(number)
        ]

    monkeypatch.setattr(data.sampler, "draws", with_a_loss)
    less = [(step.weight, dict(step.divisors)) for step in data.steps(0, steps)]
    assert [number for number in range(steps) if less[number] != whole[number]] == [broken]
    (before, divisors), (after, fewer) = whole[broken], less[broken]
    assert fewer["samples"] == 2
    assert after / 2 == pytest.approx(before / divisors["samples"], rel=1e-12)  # the factor of each that is left


def test_an_elastic_resume_does_not_change_what_a_sample_counts(home: Path, sums: dict[str, list[np.ndarray]]) -> None:
    """An epoch that begins by samples, is stopped, and goes on by tokens in another mix: the sum over its steps is the epoch's."""
    begun = ("name=elastic", "train.batch_size=3")
    planned = sampler_of(mixed_config(home, *begun)).steps_per_epoch
    first = trained_gradients(str(home), begun, 2)
    rest = ("name=elastic", *SCHEDULES["window"])
    config = mixed_config(home, *rest, "train.steps=3")
    state = sampler_of(mixed_config(home, *begun)).state(2)
    assert state["position"]["planned"] == planned
    sampler = sampler_of(config)
    assert "grouped differently" in (sampler.resume(state) or "")
    last = next(step for step in itertools.count(2) if sampler.locate(step).epoch == 1)
    second = trained_gradients(str(home), rest, last)
    assert len(second) == last - 2 and last != planned
    results = [sum(grads) / planned for grads in zip(*first, *second, strict=True)]
    assert furthest(results, sums["sample"]) < EPS


def test_a_run_goes_on_with_its_own_weighting_alone(home: Path) -> None:
    options = ("name=before", "train.batch_size=3", "train.log_every=1")
    trained_gradients(str(home), (*options, "objective.weighting=step"), 2)
    config = mixed_config(home, *options, "train.steps=3")
    with pytest.raises(UserError, match=r"started with another objective\.weighting"):
        TrainPipeline(config, task=toy_task(config)).run()
    trained_gradients(str(home), (*options, "objective.weighting=step"), 6)
    rows = [row for row in read_metrics(home / "runs" / "before" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["weight"] for row in rows] == [1.0] * 6 and len({row["samples"] for row in rows}) > 1


def test_the_default_and_bad_values(home: Path) -> None:
    assert mixed_config(home).weighting == "sample"
    for value in ("samples", "1", "null"):
        with pytest.raises(UserError, match=r"'objective\.weighting'"):
            mixed_config(home, f"objective.weighting={value}")
    with pytest.raises(UserError, match=r"unknown key 'objective\.wieghting'.*did you mean 'objective\.weighting'"):
        mixed_config(home, "objective.wieghting=step")


def character_gradient(folder: Path, name: str, *overrides: str) -> list[np.ndarray]:
    """The mean gradient over the first epoch of a run of the character task, whose terms are divided by tokens."""
    config = character_config(folder, f"name={name}", *STILL, *overrides)
    task = CharacterDomain(config)
    steps = task.data(ALONE).sampler.steps_per_epoch
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    with recorded_gradients() as recorded:
        TrainPipeline(config).run()
    assert len(recorded) == steps
    return mean_gradients([[grad.numpy() for grad in grads] for grads in recorded])


def test_a_task_that_divides_by_tokens_takes_the_weighting_of_tokens(tmp_path: Path) -> None:
    sizes = {"one": "train.batch_size=1000", "some": "train.batch_size=6", "few": "train.batch_size=3"}
    by_token = {
        name: character_gradient(tmp_path, f"token-{name}", size, "objective.weighting=token")
        for name, size in sizes.items()
    }
    assert furthest(by_token["some"], by_token["one"]) < 3 * EPS  # of 23 characters in each of 20 packs
    assert furthest(by_token["few"], by_token["one"]) < 3 * EPS
    by_step = character_gradient(tmp_path, "step", sizes["some"])
    assert furthest(by_step, by_token["one"]) > 1e-3
