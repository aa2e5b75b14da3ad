"""Gradients of an epoch on several ranks, whose steps are others than on one: a sample counts the same (objective.weighting)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.mixed_runs import (
    BY_TOKENS,
    IMAGE,
    IMAGES,
    VIDEO,
    VIDEOS,
    mean_gradients,
    mixed_config,
    mixed_home,
    sampler_of,
    sums_by_bucket,
    trained_gradients,
)
from tests.support.spawn import run_ranks

SCHEDULES = {
    "same": BY_TOKENS,  # a step grows with the ranks
    "window": (*BY_TOKENS, "batching.mix=window", "batching.accumulate=2"),
    "samples": ("train.batch_size=3", "train.micro_batch_size=1"),  # ranks without samples compute fillers
}
EPS = 3e-6  # as in tests/unit/pipelines/test_weighting.py


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_home(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def truth(home: Path) -> list[np.ndarray]:
    """The mean over all samples of the gradients of their losses."""
    sums = sums_by_bucket(mixed_config(home))
    return [((i + v) / (IMAGES + VIDEOS)).numpy() for i, v in zip(sums[IMAGE], sums[VIDEO], strict=True)]


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        ("window", "ddp"),
        pytest.param("same", "fsdp", marks=pytest.mark.slow),
        pytest.param("samples", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_sample_counts_the_same_on_two_ranks(
    home: Path, truth: list[np.ndarray], schedule: str, strategy: str
) -> None:
    options = (f"name={strategy}-{schedule}", f"parallel.strategy={strategy}", *SCHEDULES[schedule])
    two, one = (sampler_of(mixed_config(home, *options), world).steps_per_epoch for world in (2, 1))
    assert (two < one) == (schedule != "samples")  # another schedule than on one process
    first, second = run_ranks(trained_gradients, 2, str(home), options, two)
    for grads in (first, second):
        actual = mean_gradients(grads)
        apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(actual, truth, strict=True))
        assert apart < EPS
