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


def one_group(folder: str) -> tuple[int, int, list[str]]:
    """Both ranks meet all samples, as under sequence parallelism: entries made here, and in all, and what was read."""
    import torch.distributed as dist

    from mmspeed.data import Batching, BatchSampler, FirstEpoch, Loader
    from mmspeed.data.cache.keys import digest
    from mmspeed.device import pick
    from mmspeed.preprocess import OnlineBuilder

    config, rank = small_config(Path(folder)), dist.get_rank()
    builder = OnlineBuilder(config)
    builder.plan(pick("cpu"), rank, 2, None)
    cache = DatasetCache(config.cache_dir, partial=True)
    sampler = BatchSampler(cache.split("train"), Batching(3, group=2), seed=0)
    first = FirstEpoch(cache, sampler, builder, rank, 2, start=0, stop=100)
    loader = Loader(cache, sampler, rank=rank, world=2, first_epoch=first)
    read = [digest(b["latents"].numpy().tobytes()) for step in loader.steps(0, 6) for b in step.batches]
    assert not first.active
    return first.encoded_here, first.encoded, read


@pytest.mark.slow
def test_ranks_of_one_group_share_the_work(tmp_path: Path) -> None:
    (a, all_a, read_a), (b, all_b, read_b) = run_ranks(one_group, 2, str(tmp_path))
    assert all_a == all_b == a + b == 16 and min(a, b) >= 6
    assert read_a == read_b and len(read_a) == 6
    assert DatasetCache(small_config(tmp_path).cache_dir).duplicates == 0
