"""Timestep shift by size in training, validation, samples and checks: the times that a real model is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mmspeed.config import Config, make_config
from mmspeed.config.schema import FlowConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.diffusion.flow import euler_times, shift_time, time_from_quantile
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.small import small_sora
from mmspeed.protocols import RunPlace
from mmspeed.shapes import Bucket
from tests.support.published import BUCKETS, published_config, write_cache
from tests.support.runs import small_config

CLIP, IMAGE = BUCKETS  # latents of 3 x 4 x 6 and 1 x 4 x 6 in patches of 1 x 2 x 2: 18 and 6 tokens
SHIFTS = {
    "auto": {CLIP: (18 / 256) ** 0.5, IMAGE: (6 / 256) ** 0.5},
    "{9x32x48: 3.0, 1x32x48: 0.5}": {CLIP: 3.0, IMAGE: 0.5},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of videos and images, without encoders."""
    folder = tmp_path_factory.mktemp("shift")
    write_cache(config_of(folder))
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return published_config(folder, "wan", "model.size=nano", *overrides)


class Times(nn.Module):
    """A model, and the times and latent frames of its calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[float]]] = []

        def note(module: nn.Module, args: tuple[object, ...], inputs: dict[str, torch.Tensor]) -> None:
            self.seen.append((inputs["x_BCThw"].shape[2], inputs["t"].tolist()))

        model.register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.parametrize("shift", SHIFTS)
def test_training_is_at_the_times_of_each_buckets_shift(mixed: Path, shift: str) -> None:
    config, plain = config_of(mixed, f"objective.shift={shift}"), FlowConfig(kind="flow")
    task, place = VideoDomain(config), RunPlace(Device("cpu", 0))
    task.open(place)
    model, met = task.build()["model"].to_empty(device="cpu"), set()
    times = Times(model)
    for step in task.data(place).steps(0, 6):
        for batch in step.batches:
            with torch.no_grad():
                values_of(task, {"model": model}, batch)
            bucket = batch.shape
            assert isinstance(bucket, Bucket)
            expected = shift_time(time_from_quantile(batch["quantiles"], plain), SHIFTS[shift][bucket]).float()
            assert times.seen[-1] == ((3 if bucket == CLIP else 1), expected.tolist())
            met.add(bucket)
    assert met == {CLIP, IMAGE}


def test_a_run_validates_and_samples_at_the_shift_of_the_size(home: Path) -> None:
    config = small_config(
        home, "objective.shift=auto", "name=auto", "train.steps=2", "validate.prompts=[a rabbit]", "sample.guidance=1"
    )
    TrainPipeline(config).run()
    pipe = TextToVideo.from_run(config.run_dir)
    times = Times(pipe.model)
    for bucket, tokens in ((Bucket(5, 32, 48), 12), (Bucket(1, 32, 48), 6), (Bucket(9, 64, 64), 48)):
        pipe("a rabbit", frames=bucket.frames, height=bucket.height, width=bucket.width, steps=3)
        wanted = euler_times(3, (tokens / 256) ** 0.5)[:-1].float()
        assert [t for _, (t,) in times.seen[-3:]] == wanted.tolist()
    fast = pipe("a rabbit", steps=3, sampler="unipc", guidance=4.0, guidance_rescale=0.7)[0]
    assert fast.frames_FHWC.shape == (5, 32, 48, 3)
    with pytest.raises(UserError, match=r"sample\.guidance_rescale is -1"):
        pipe("a rabbit", guidance_rescale=-1)


def test_a_size_without_a_number_is_refused_before_the_first_step(home: Path) -> None:
    table = "objective.shift={5x32x48: 3.0, 1x32x48: 0.5}"
    config = small_config(home, table, "name=table", "validate.prompts=[a rabbit]", "sample.frames=9")
    with pytest.raises(
        UserError, match=r"objective\.shift has no number for 9x32x48: add it, use one of 5x32x48, 1x32x48"
    ):
        TrainPipeline(config).run()
    assert not list(config.run_dir.glob("checkpoints/*"))


def test_a_check_of_layouts_takes_small_samples_of_other_sizes(mixed: Path, tmp_path: Path) -> None:
    small = small_sora(config_of(mixed, "objective.shift={9x32x48: 3.0, 1x32x48: 0.5}"), tmp_path / "small").config
    assert isinstance(small.objective, FlowConfig) and isinstance(small.objective.shift, dict)
    assert [small.objective.shift[str(bucket)] for bucket in sorted(small.buckets)] == [0.5, 3.0]
    assert make_config(small.model_dump(mode="json", by_alias=True)) == small


def test_an_interrupted_run_keeps_its_shift(home: Path) -> None:
    config = small_config(home, "objective.shift=auto", "name=kept", "train.steps=1")
    TrainPipeline(config).run()
    with pytest.raises(UserError, match="objective"):
        TrainPipeline(small_config(home, "objective.shift=2.0", "name=kept", "train.steps=2")).run()
    assert TrainPipeline(small_config(home, "objective.shift=auto", "name=kept", "train.steps=2")).run().finished
