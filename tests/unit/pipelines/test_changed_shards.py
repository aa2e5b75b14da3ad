"""Bytes of a shard that change under a running training end it within an epoch, with the shard and the entry in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.tasks.video import VideoTask
from mmspeed.pipelines.training.events import StepEvent
from tests.support.runs import losses
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache

EPOCH = 3  # steps: seven samples, three a step


class _Change(TrainCallback):
    """Changes a byte of each latent's values, once a step is done."""

    def __init__(self, root: Path, step: int) -> None:
        self.root, self.step = root, step

    def on_step(self, event: StepEvent) -> None:
        if event.step == self.step:
            cache = DatasetCache(self.root)
            for key in cache.keys("latents"):
                entry = cache.entry(key, "latents")
                with open(self.root / entry.shard, "r+b") as file:
                    file.seek(entry.offset + entry.bytes - 1)
                    last = file.read(1)[0]
                    file.seek(entry.offset + entry.bytes - 1)
                    file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_that_change_under_a_run_end_it_within_an_epoch(tmp_path: Path, workers: int) -> None:
    config = toy_config(tmp_path, "train.steps=30", "validate.samples=0", f"train.loader_workers={workers}")
    write_toy_cache(config)
    change = _Change(config.local_cache_dir(), 4)
    with pytest.raises(UserError) as caught:
        TrainPipeline(config, task=VideoTask(config, build=build_toy), callbacks=[change]).run()
    assert re.search(
        r"shard latents/\S+\.tar is damaged at entry [0-9a-f]{32}: its bytes have changed", str(caught.value)
    )
    ahead = config.train.prefetch
    assert 4 <= len(losses(config)) <= 4 + EPOCH + ahead
