"""SIGKILL at any moment: the same command goes on and ends as if nothing had happened (law 4)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.preprocess import CacheBuilder
from tests.support.forks import ended, fork, kill, ranks, wait
from tests.support.killed_builds import another, assert_same, whole_build


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, float]:
    """A cache whose making was never interrupted, and the seconds that it took."""
    return whole_build(tmp_path_factory.mktemp("builds"))


@pytest.mark.slow
def test_of_two_parts_of_an_array_one_is_killed(whole: tuple[Config, float], tmp_path: Path) -> None:
    (config, seconds), moments = whole, 15
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
def test_of_two_launched_processes_one_is_killed_and_the_launcher_ends_the_other(
    whole: tuple[Config, float], tmp_path: Path
) -> None:
    (config, seconds), moments = whole, 10
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
