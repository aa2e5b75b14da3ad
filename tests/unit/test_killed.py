"""SIGKILL at any moment: the same command goes on and ends as if nothing had happened (law 4)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmspeed.config import Config, dump_config
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.runs import losses, small_config
from tests.unit.test_build import checksums

pytestmark = pytest.mark.slow


def run_and_kill(command: str, config: Config, file: Path, ready: Callable[[], bool], delay: float) -> bool:
    """Start a command, kill it `delay` seconds after `ready()`; True when it was still running then."""
    file.write_text(dump_config(config), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "mmspeed", command, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay)
    alive = process.poll() is None
    process.kill()
    process.wait()
    return alive


def test_preprocess_killed_at_random_moments_ends_with_the_same_entries(tmp_path: Path) -> None:
    whole = small_config(tmp_path / "whole", "preprocess.shard_mb=0.004", clips=24)
    CacheBuilder(whole).run()
    killed = small_config(
        tmp_path / "killed", "preprocess.shard_mb=0.004", f"data.sources.0.path={whole.data.sources[0].path}", clips=24
    )
    moments = random.Random(0)
    index = tmp_path / "killed" / "cache" / "index"
    interrupted = 0
    for _ in range(10):
        before = len(list(index.glob("*.parquet")))
        interrupted += run_and_kill(
            "preprocess",
            killed,
            tmp_path / "killed.yaml",
            lambda before=before: len(list(index.glob("*.parquet"))) > before,
            moments.uniform(0.0, 0.05),
        )
    assert interrupted >= 3  # else the test shows nothing
    CacheBuilder(killed).run()
    assert checksums(tmp_path / "killed" / "cache") == checksums(tmp_path / "whole" / "cache")
    assert not list((tmp_path / "killed" / "cache").rglob(".*tmp*"))


def test_training_killed_at_random_moments_writes_the_same_losses(tmp_path: Path) -> None:
    overrides = ("train.steps=40", "checkpoint.every=3", "validate.every=100", "validate.samples=0")
    whole = small_config(tmp_path, "name=whole", *overrides)
    CacheBuilder(whole).run()
    TrainPipeline(whole).run()
    killed = small_config(tmp_path, "name=killed", *overrides)
    moments = random.Random(0)
    for _ in range(4):
        before = len(losses(killed))
        run_and_kill(
            "train",
            killed,
            tmp_path / "killed.yaml",
            lambda before=before: len(losses(killed)) > before + 3,
            moments.uniform(0.0, 0.3),
        )
    TrainPipeline(killed).run()
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-5)  # other numbers of threads in the two processes
    assert len(losses(killed)) == 40
