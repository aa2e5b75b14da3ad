"""Published models that are given frames are trained from a cache; their calls are in test_official_check.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.cli.init import write_config
from mmspeed.config import Config, load_config
from mmspeed.data import DatasetCache
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import RunPlace
from tests.support.runs import losses
from tests.support.tiny_repositories import save_cogvideox, save_wan

SMALL = (
    "data.limit=4", "data.buckets=[{frames: 13, height: 32, width: 48}]", "data.val_fraction=0", "validate.prompts=[]",
    "train.steps=2", "train.log_every=1", "train.ema_decay=null",
)  # fmt: skip


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "own.yaml", (*SMALL, *overrides))


def test_an_image_to_video_model_is_trained_from_a_cache(tmp_path: Path) -> None:
    """The first epoch encodes the condition of each clip, and a model that is always given frames says so."""
    save_wan(tmp_path / "tiny-wan", in_channels=36)
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny-wan"))
    place = RunPlace(Device("cpu", 0))
    halves = ("conditioning.first=0.5", "conditioning.first_last=0.5", "data.val_fraction=0.5", "sample.steps=2")
    config = config_of(tmp_path, *halves)
    TrainPipeline(config, online=True).run()
    assert len(losses(config)) == 2
    held_out = [sample.source for sample in DatasetCache(config.cache_root).split("val")]
    samples = config.run_dir / "samples" / "step-00000002"
    assert [path.read_text() for path in sorted(samples.glob("*.txt"))] == held_out[:2]
    assert len(list(samples.glob("*.mp4"))) == len(held_out[:2]) > 0
    task = VideoDomain(config)
    task.open(place)
    (batch, *_) = (batch for step in task.data(place).steps(0, 1) for batch in step.batches)
    assert batch["condition"].shape == batch["latents"].shape
    for mask_T, condition_CThw in zip(batch["conditioning_mask"], batch["condition"], strict=True):
        assert bool(mask_T[0]) and condition_CThw[:, 1:].abs().max() > 0.1
    cache = DatasetCache(config.cache_root)
    stored = cache.latent(cache.split("train")[0].latent_keys[0])
    assert {"mean", "grey_first", "grey_first_last"} <= set(stored)
    with pytest.raises(UserError, match=r"is always given frames: its modes are first, first_last"):
        VideoDomain(config_of(tmp_path, "conditioning.first=0")).use(task.sizes).build()


@pytest.mark.slow
def test_the_first_frame_alone_is_stored_for_a_codec_that_mixes_frames(tmp_path: Path) -> None:
    """CogVideoX: the image's latent is drawn from its posterior by name, other frames of the condition are zeros."""
    save_cogvideox(tmp_path / "tiny", "5b", images=True)
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny"))
    assert load_config(tmp_path / "own.yaml").conditioning.shares == {"first": 1.0}  # as the model always is
    config = config_of(tmp_path, "train.steps=1", "data.limit=2")
    TrainPipeline(config, online=True).run()
    assert len(losses(config)) == 1
    task = VideoDomain(config)
    task.open(RunPlace(Device("cpu", 0)))
    (batch, *_) = (batch for step in task.data(RunPlace(Device("cpu", 0))).steps(0, 1) for batch in step.batches)
    cache = DatasetCache(config.cache_root)
    stored = cache.latent(cache.split("train")[0].latent_keys[0])
    assert {"mean", "logvar", "first", "first_logvar"} <= set(stored)
    assert not batch["condition"][:, :, 1:].any() and batch["conditioning_mask"][:, 0].all()
    assert not torch.equal(batch["condition"][:, :, 0], batch["latents"][:, :, 0])  # all frames are noisy and count
    again = next(batch for step in task.data(RunPlace(Device("cpu", 0))).steps(0, 1) for batch in step.batches)
    assert torch.equal(again["condition"], batch["condition"])
