"""Bytes of a shard that change under a running training end it within an epoch, with the shard and the entry in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from tests.support.changed_shards import ChangeLatents
from tests.support.runs import losses
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache

EPOCH = 3  # steps: seven samples, three a step


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_that_change_under_a_run_end_it_within_an_epoch(tmp_path: Path, workers: int) -> None:
    config = toy_config(tmp_path, "train.steps=30", "validate.samples=0", f"train.loader_workers={workers}")
    write_toy_cache(config)
    change = ChangeLatents(config.local_cache_dir(), 4)
    with pytest.raises(UserError) as caught:
        TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[change]).run()
    assert re.search(
        r"shard latents/\S+\.tar is damaged at entry [0-9a-f]{32}: its bytes have changed", str(caught.value)
    )
    ahead = config.train.prefetch
    assert 4 <= len(losses(config)) <= 4 + EPOCH + ahead
