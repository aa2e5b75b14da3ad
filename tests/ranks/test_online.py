"""The first epoch on an incomplete cache with several ranks: every entry is made once, wherever it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.preprocess import CacheBuilder
from tests.ranks.test_sequence_train import WatchedTask
from tests.support.caches import tar_bytes
from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks


def train(folder: str, overrides: tuple[str, ...]) -> dict[str, int]:
    """Train with a builder; entries that this rank made, and all made."""
    from mmspeed.pipelines import TrainPipeline
    from mmspeed.preprocess import OnlineBuilder

    config = small_config(Path(folder), *overrides)
    task = WatchedTask(config, OnlineBuilder(config))
    TrainPipeline(config, task=task).run()
    first = task.data_of_run.loader.first_epoch
    return {"here": first.encoded_here, "all": first.encoded} if first is not None else {"here": 0, "all": 0}


def assert_same_cache(config: Config, other: Config) -> None:
    assert tar_bytes(config.cache_dir) == tar_bytes(other.cache_dir)
    samples = Path("index") / "samples.parquet"
    assert (config.cache_dir / samples).read_bytes() == (other.cache_dir / samples).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(), ("data.repeats=3", "preprocess.shard_mb=0.01", "train.steps=9")],
)
def test_two_ranks_make_each_entry_once(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """With repeats a rank reads what the other has just made, also from shards that are sealed meanwhile."""
    offline = small_config(tmp_path / "offline", *overrides)
    CacheBuilder(offline).run()
    run_ranks(train, 1, str(tmp_path / "offline"), overrides)
    result = run_ranks(train, 2, str(tmp_path / "online"), overrides)
    config = small_config(tmp_path / "online", *overrides)
    assert_same_cache(config, offline)
    assert DatasetCache(config.cache_dir).duplicates == 0
    assert all(part["all"] == 16 and part["here"] > 0 for part in result) and sum(p["here"] for p in result) == 16
    assert losses(config) == pytest.approx(losses(offline), rel=2e-4)
