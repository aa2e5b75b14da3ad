"""Spoiled samples in whole runs, on one process and on two ranks: what is left out, what counts, and what is said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mmspeed.log import read_metrics
from tests.support.spawn import run_ranks
from tests.support.toy_runs import toy_config, train_toy, write_toy_cache

QUIET = ("validate.every=100", "validate.samples=0", "checkpoint.every=100", "checkpoint.keep_best=false")


def cache_with(folder: Path, factors: Mapping[int, float], samples: int = 8) -> Path:
    """A folder with a cache in which the latents of some samples are multiplied by a factor."""
    write_toy_cache(toy_config(folder), samples, factors=factors)
    return folder


def rows(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["kind"] == kind]


def test_sound_samples_of_a_step_count_beside_spoiled_ones(tmp_path: Path) -> None:
    cache_with(tmp_path, {4: math.nan})
    train_toy(str(tmp_path), ("name=one", *QUIET))
    run_ranks(train_toy, 2, str(tmp_path), ("name=two", *QUIET))
    for name in ("one", "two"):
        said = rows(tmp_path, name, "left_out")
        assert [row["samples"] for row in said] == [["4.mp4"]] * 2  # once in each of two epochs
        train = rows(tmp_path, name, "train")
        assert [row["skipped_steps"] for row in train] == [0] * 6 and train[-1]["left_out_samples"] == 2
    one, two = ([row["loss"] for row in rows(tmp_path, name, "train")] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    assert all(map(math.isfinite, one))
