"""Losses by latent frame: masks from the cache's record of frames and from Python, in training and on held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.config.schema import DdpmConfig, FlowConfig
from mmspeed.data import DatasetCache, SampleUse
from mmspeed.data.cache.tables import Entry
from mmspeed.data.loading.collate import assemble
from mmspeed.data.loading.frame_masks import distinct_frames
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.diffusion.objective import make_objective, mean_error
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import Batch, RunPlace
from mmspeed.shapes import Bucket, Strides
from tests.support.published import published_config, write_cache

CPU, STRIDES = Device("cpu", 0), Strides(4, 8)
STILL = (0, 1, 2, 3, 4, 4, 4, 4, 4)  # nothing new in the last latent frame


def taken(number: int, bucket: Bucket) -> Sequence[int]:
    return range(1) if bucket.is_image else STILL if number % 2 == 0 else range(9)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    write_cache(config_of(folder), taken=taken)
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return published_config(folder, "wan", "model.size=nano", "train.steps=2", *overrides)


def first_steps(task: VideoDomain, steps: int = 4) -> list[Batch]:
    task.open(RunPlace(CPU))
    return [batch for step in task.data(RunPlace(CPU)).steps(0, steps) for batch in step.batches]


def entry_of(frames: Sequence[int]) -> Entry:
    return Entry("k", "latents", "s", 0, 0, "", "", 0, "", tuple(frames), None, "clip.mp4", "{}")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (range(9), [True, True, True]),
        (STILL, [True, True, False]),
        ((0, 0, 0, 0, 1, 2, 2, 2, 2), [True, True, True]),  # one new frame is enough
        ((5,), [True]),
    ],
)
def test_a_latent_frame_is_distinct_by_a_frame_that_is_no_repeat(frames: Sequence[int], expected: list[bool]) -> None:
    assert distinct_frames(entry_of(frames), STRIDES).tolist() == expected


@pytest.mark.parametrize("frames", [(0, 1, 2)])
def test_an_entry_without_a_record_of_its_frames_is_refused(frames: Sequence[int]) -> None:
    with pytest.raises(
        UserError,
        match=r"train\.loss_frames: distinct needs the frames taken of clip\.mp4.*use train\.loss_frames: all",
    ):
        distinct_frames(entry_of(frames), STRIDES)


@pytest.mark.parametrize(
    "config", [FlowConfig(kind="flow"), DdpmConfig(kind="ddpm", min_snr_gamma=5, zero_terminal_snr=False)]
)
def test_frames_that_do_not_count_change_neither_loss_nor_gradient(config: FlowConfig | DdpmConfig) -> None:
    objective, t_B = make_objective(config), torch.tensor([0.2, 0.9])
    shape = (2, 3, 4, 2, 3)
    target, predicted = rng.normal(shape, 0, "target"), rng.normal(shape, 0, "predicted").requires_grad_()
    mask_BT = torch.tensor([[True, True, False, True], [False, True, False, False]])
    loss_B = mean_error(predicted, target, mask_BT) * objective.weight(t_B)
    by_hand = torch.stack([(predicted[i, :, mask_BT[i]] - target[i, :, mask_BT[i]]).square().mean() for i in range(2)])
    torch.testing.assert_close(loss_B, by_hand * objective.weight(t_B))
    (gradient,) = torch.autograd.grad(loss_B.sum(), predicted)
    assert (gradient.abs().amax((1, 3, 4)) > 0).tolist() == mask_BT.tolist()
    wrong = predicted.detach().clone()
    wrong[~mask_BT[:, None].expand(2, 3, 4)] = torch.nan
    assert torch.equal(mean_error(wrong, target, mask_BT) * objective.weight(t_B), loss_B.detach())
    everything = torch.ones(2, 4, dtype=torch.bool)
    torch.testing.assert_close(mean_error(predicted, target, everything), mean_error(predicted, target))
    weighted = mean_error(predicted, target, torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]]))
    frames = (predicted - target).square().mean((1, 3, 4))
    expected = torch.stack(((frames[0, 0] + 3 * frames[0, 3]) / 4, frames[1].mean()))
    torch.testing.assert_close(weighted, expected)


def test_training_counts_the_distinct_frames_alone(home: Path) -> None:
    plain, distinct = (VideoDomain(config_of(home, f"train.loss_frames={kind}")) for kind in ("all", "distinct"))
    pairs = list(zip(first_steps(plain), first_steps(distinct), strict=True))
    model = distinct.build()["model"].to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    masked = 0
    for every, some in pairs:
        assert "loss_mask" not in every and every.names == some.names
        mask_BT = some["loss_mask"]
        stills = [int(source[:-4]) % 2 == 0 and not every.shape == Bucket(1, 32, 48) for source in some.sources]
        assert (~mask_BT[:, -1]).tolist() == stills and bool(mask_BT[:, 0].all())
        masked += sum(stills)
        with torch.no_grad():
            whole = values_of(plain, {"model": model}, every).loss
            part = values_of(distinct, {"model": model}, some).loss
        assert torch.equal(whole.weight_I, part.weight_I)
        same = (whole.loss_I - part.loss_I).abs() < 1e-6 * whole.loss_I
        assert same.tolist() == [not still for still in stills]
    assert masked > 2


def last_frame_alone(entry: Entry, strides: Strides) -> Tensor:
    frames = 1 + (len(entry.frames) - 1) // strides.temporal
    return torch.arange(frames) == frames - 1


def nothing(entry: Entry, strides: Strides) -> Tensor:
    return torch.zeros(1 + (len(entry.frames) - 1) // strides.temporal)


def test_a_mask_may_be_a_function_of_ones_own(home: Path) -> None:
    task = VideoDomain(config_of(home))
    task.frame_mask = last_frame_alone
    assert all(
        batch["loss_mask"].sum(1).eq(1).all() and batch["loss_mask"][:, -1].all() for batch in first_steps(task, 2)
    )
    cache = DatasetCache(task.config.cache_root)
    sample = next(sample for sample in cache.split("train") if sample.bucket.splits)
    draws = [(SampleUse(sample, 0, 0), 1.0)]
    with pytest.raises(
        UserError, match=r"the loss mask of \d+\.mp4 is \[0\.0, 0\.0, 0\.0\]: it needs 3 weights, .* one above 0"
    ):
        assemble(cache, draws, 0, 0.0, frame_mask=nothing)
    with pytest.raises(UserError, match=r"it needs 3 weights"):
        assemble(cache, draws, 0, 0.0, frame_mask=lambda entry, strides: torch.ones(2))


def test_held_out_losses_count_the_same_frames(home: Path) -> None:
    """The held-out sample is still at its end: its loss differs by the mask alone at the same weights (the first validation of two runs
    whose learning rate is next to 0)."""
    losses = {}
    for kind in ("all", "distinct"):
        config = config_of(home, f"train.loss_frames={kind}", f"name={kind}", "train.steps=1", "train.lr=1e-30")
        TrainPipeline(config, task=VideoDomain(config)).run()
        rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "validation"]
        losses[kind] = rows[-1]["loss"]
    assert losses["all"] != pytest.approx(losses["distinct"], rel=1e-4)
