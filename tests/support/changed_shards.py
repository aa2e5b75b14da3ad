"""Shards whose bytes change under a running training."""

from __future__ import annotations

from pathlib import Path

from mmspeed.data import DatasetCache
from mmspeed.pipelines import TrainCallback
from mmspeed.pipelines.training.events import StepEvent


class ChangeLatents(TrainCallback):
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
