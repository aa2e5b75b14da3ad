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
from tests.support.forks import ended, fork, kill, ranks, wait
from tests.support.killed_builds import another, assert_same, kill_builds, whole_build
from tests.support.runs import losses, small_config

MOMENTS = [2, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, float]:
    """A cache whose making was never interrupted, and the seconds that it took."""
    return whole_build(tmp_path_factory.mktemp("builds"))


@pytest.mark.slow
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_build_killed_at_random_moments_ends_the_same(
    whole: tuple[Config, float], tmp_path: Path, moments: int
) -> None:
    config, seconds = whole
    kill_builds(config, seconds, tmp_path, random.Random(moments), moments)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [1, 15])
def test_of_two_parts_of_an_array_one_is_killed(whole: tuple[Config, float], tmp_path: Path, moments: int) -> None:
    config, seconds = whole
    draw = random.Random(moments)
    for trial in range(moments):
        cut = another(config, tmp_path / str(trial))
        log = tmp_path / f"{trial}.txt"
        first, second = (fork(CacheBuilder(cut, f"{part}/2").run, log) for part in (1, 2))
        time.sleep(draw.uniform(0.0, 1.5 * seconds))
        if ended(second) is None:
            kill(second)
        assert wait(first) == 0, log.read_text()
        assert wait(fork(CacheBuilder(cut, "2/2").run, log)) == 0, log.read_text()
        assert_same(cut, config)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [1, 10])
def test_of_two_launched_processes_one_is_killed_and_the_launcher_ends_the_other(
    whole: tuple[Config, float], tmp_path: Path, moments: int
) -> None:
    config, seconds = whole
    draw = random.Random(moments)

    def start(cut: Config, log: Path) -> list[int]:
        return [fork(lambda: CacheBuilder(cut).run(), log, environment) for environment in ranks(2)]

    for trial in range(moments):
        cut = another(config, tmp_path / str(trial))
        log = tmp_path / f"{trial}.txt"
        pids = start(cut, log)
        time.sleep(draw.uniform(0.0, 1.5 * seconds))
        first = draw.randrange(2)
        for pid in (pids[first], pids[1 - first]):
            if ended(pid) is None:
                kill(pid)
        assert [wait(pid) for pid in start(cut, log)] == [0, 0], log.read_text()
        assert_same(cut, config)


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


@pytest.mark.slow
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
