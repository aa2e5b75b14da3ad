"""Builds of a cache that are killed at random moments, and go on by the same command."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from mmspeed.config import Config
from mmspeed.data.cache.files import READERS_LOCK
from mmspeed.preprocess import CacheBuilder
from tests.support.caches import tar_bytes
from tests.support.forks import ended, fork, kill, wait
from tests.support.runs import small_config

CLIPS = 5
SMALL_SHARDS = "preprocess.shard_mb=0.004"  # a few latents in a shard, and a caption: many shards are sealed on the way


def whole_build(folder: Path) -> tuple[Config, float]:
    """A cache whose making was never interrupted, and the seconds that it takes."""
    torch.set_num_threads(1)  # forked processes have no threads of ours to compute with
    config = small_config(folder / "whole", SMALL_SHARDS, clips=CLIPS)
    CacheBuilder(config).run()  # and all is imported
    other = small_config(folder / "timed", SMALL_SHARDS, clips=CLIPS)
    started = time.monotonic()
    assert wait(fork(CacheBuilder(other).run, folder / "log.txt")) == 0
    return config, time.monotonic() - started


def another(whole: Config, folder: Path) -> Config:
    """The same sources, into a new cache."""
    source = f"data.sources.0.path={whole.data.sources[0].path}"
    return small_config(folder, SMALL_SHARDS, source)


def assert_same(config: Config, whole: Config) -> None:
    """The same entries, the same bytes of each, the same table of samples; nothing is left over."""
    root = config.cache_dir
    assert tar_bytes(root) == tar_bytes(whole.cache_dir)
    samples = "index/samples.parquet"
    assert (root / samples).read_bytes() == (whole.cache_dir / samples).read_bytes()
    left = [path.name for path in root.rglob(".*") if path.is_file()]
    assert left == [READERS_LOCK] and not (root / "parts").exists()


def kill_builds(whole: Config, seconds: float, folder: Path, draw: random.Random, moments: int) -> None:
    """Kill builds of `seconds` at so many random moments; each goes on until it is whole, and is then the same as `whole`."""
    kills = trial = 0
    while kills < moments:
        config = another(whole, folder / str(trial))
        log = folder / f"{trial}.txt"
        code = None
        while code != 0:
            pid = fork(CacheBuilder(config).run, log)
            if kills == moments:
                code = wait(pid)
                assert code == 0, log.read_text()
                continue
            time.sleep(draw.uniform(0.0, seconds))
            code = ended(pid)
            assert code in (None, 0), log.read_text()
            if code is None:
                kill(pid)
                kills += 1
        assert_same(config, whole)
        trial += 1
