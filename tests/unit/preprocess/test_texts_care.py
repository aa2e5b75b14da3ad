"""Text caches under kills and damages: the same bytes in the end, and no id that differs without an error."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from tests.support.cache_damages import damage, restore
from tests.unit.preprocess.test_texts import build, files, many


def run_build(root: str, path: str) -> None:
    build(Path(root), [{"path": path}], shard_mb=1.0)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    kills = 30
    path, context = (
        many(tmp_path / "a.jsonl"),
        multiprocessing.get_context("fork"),
    )  # a start from nothing would be seconds

    def start(root: Path) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=run_build, args=(str(root), str(path)))
        process.start()
        return process

    began = time.monotonic()
    start(tmp_path / "whole").join()
    seconds = time.monotonic() - began
    whole = files(tmp_path / "whole" / "cache")
    draw, killed = random.Random(0), 0
    for number in range(2 * kills + 4):
        if killed == kills:
            break
        root = tmp_path / str(number)
        process = start(root)
        time.sleep(draw.uniform(0, seconds))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        else:
            seconds *= 0.7  # the machine was busier when the whole one was made
        process.join()
        last = start(root)
        last.join()
        assert last.exitcode == 0 and files(root / "cache") == whole, number
    assert killed == kills


def contents(root: Path) -> list[list[int]]:
    """The ids of all documents; raises UserError where one is damaged."""
    cache = TextCache(root)
    return [cache.ids(number).tolist() for number in range(len(cache))]


@pytest.mark.parametrize("damages", [40, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damages_are_noticed(tmp_path: Path, damages: int) -> None:
    build(tmp_path, [{"path": str(many(tmp_path / "a.jsonl", 1_000))}], shard_mb=1.0)
    root = tmp_path / "cache"
    whole = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    right = contents(root)
    for seed in range(damages):
        what = damage(root, seed)
        try:
            noticed = bool(verify(root).damage)
        except UserError:
            noticed = True
        assert noticed, what
        try:
            assert contents(root) == right, what  # of a file that reading does not need
        except UserError:
            pass
        restore(root, whole)
    assert contents(root) == right
