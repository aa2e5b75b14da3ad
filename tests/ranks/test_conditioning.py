"""Frames that are given, on several ranks: the mode of a use is that of one process in any layout, and a stopped run goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mmspeed.config import Config
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import Batch, Inputs
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks

SHARES = "conditioning={first: 0.35, mask: 0.35}"
TOLERANCE = {"rel": 2e-4}  # float32 rounding in another order, grown over a few steps of Adam
LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "ulysses": ("parallel.ulysses=2",),
}
Uses = dict[tuple[str, int, int], list[bool]]  # (sample, epoch, repeat) -> given latent frames


def config_of(folder: Path, *overrides: str) -> Config:
    buckets = "data.buckets=[{frames: 9, height: 32, width: 48}]"
    return small_config(folder, buckets, SHARES, "validate.samples=0", *overrides)


class WatchedTask(VideoDomain):
    """Keeps the frames that each use was given."""

    uses: Uses

    def inputs(self, model: nn.Module, batch: Batch, *more: Any, **given: Any) -> Inputs:
        real = zip(batch.names, batch.weights_I.tolist(), batch["conditioning_mask"].tolist(), strict=True)
        self.uses |= {name: frames for name, weight, frames in real if weight}
        return super().inputs(model, batch, *more, **given)


def train(folder: str, *overrides: str) -> Uses:
    """Train, or go on with a run; the uses of samples that this rank met."""
    config = config_of(Path(folder), *overrides)
    task = WatchedTask(config)
    task.uses = {}
    TrainPipeline(config, task=task).run()
    return task.uses


def train_all(folder: str) -> dict[str, Uses]:
    """A run of each layout; that of fsdp also stopped after three steps."""
    results = {name: train(folder, f"name={name}", *keys) for name, keys in LAYOUTS.items()}
    stopped = [train(folder, "name=stopped", f"train.steps={steps}", *LAYOUTS["fsdp"]) for steps in (3, 6)]
    return results | {"stopped": stopped[0] | stopped[1]}


@pytest.mark.slow
def test_modes_are_those_of_one_process_in_any_layout_and_after_a_stop(tmp_path: Path) -> None:
    from mmspeed.preprocess import CacheBuilder

    CacheBuilder(config_of(tmp_path)).run()
    truth = train(str(tmp_path), "name=one")
    assert len(truth) == 14 and len({tuple(frames) for frames in truth.values()}) > 3
    parts = train(str(tmp_path), "name=parts", "train.steps=3") | train(str(tmp_path), "name=parts", "train.steps=6")
    assert parts == truth
    one = config_of(tmp_path, "name=one")
    assert_same_run(config_of(tmp_path, "name=parts"), one)

    ranks = run_ranks(train_all, 2, str(tmp_path))
    for name in (*LAYOUTS, "stopped"):
        first, second = (rank[name] for rank in ranks)
        assert first | second == truth, name
        assert (first == second) == (name == "ulysses")  # a group meets the same, replicas their own
        assert losses(config_of(tmp_path, f"name={name}")) == pytest.approx(losses(one), **TOLERANCE), name
    assert_same_run(config_of(tmp_path, "name=stopped"), config_of(tmp_path, "name=fsdp"))


def assert_same_run(actual: Config, expected: Config) -> None:
    """Losses and the last checkpoint are equal to the bit."""
    assert losses(actual) == losses(expected)
    assert differing(whole_checkpoint(actual.run_dir), whole_checkpoint(expected.run_dir)) == []
