"""Frames that are given: their modes by name, their masks, what training makes of them, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmspeed.config import Config
from mmspeed.config.conditioning import MODES, ConditioningConfig
from mmspeed.data.loading.collate import draw_conditioning
from mmspeed.data.loading.conditioning_mask import check_conditioning, conditioning_mask, draw_mode, prefix_of
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import Batch, RunPlace
from mmspeed.protocols.calls import Conditioning
from mmspeed.shapes import Bucket, Strides
from tests.support.published import published_config, write_cache

STRIDES = Strides(4, 8)
EVERY = ("conditioning.first=0.25", "conditioning.mask=0.3", "conditioning.prefix=0.2", "conditioning.prefix_frames=5")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_cache(config_of(folder))
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return published_config(folder, "wan", "model.size=nano", "train.steps=2", *overrides)


def first_steps(task: VideoDomain, steps: int = 6) -> list[Batch]:
    place = RunPlace(Device("cpu", 0))
    task.open(place)
    return [batch for step in task.data(place).steps(0, steps) for batch in step.batches]


def test_modes_are_drawn_by_name_in_their_shares() -> None:
    config = ConditioningConfig(first=0.5, first_last=0.1, mask=0.2)
    names = [(f"key {number}", number % 3, 0) for number in range(4000)]
    modes = [draw_mode(config, 7, name) for name in names]
    assert modes == [draw_mode(config, 7, name) for name in names]  # nothing else matters
    assert modes != [draw_mode(config, 8, name) for name in names]
    counts = Counter(modes)
    assert set(counts) == {"none", "first", "first_last", "mask"}
    for mode, share in config.shares.items():
        assert counts[mode] / len(names) == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize("frames", [2, 5])
def test_masks_of_modes(frames: int) -> None:
    masks = {mode: conditioning_mask(mode, frames, 2, 0, ("a", 0, 0)).tolist() for mode in MODES}
    first, rest = [True], [False] * (frames - 1)
    assert masks["none"] == [False, *rest] and masks["first"] == first + rest
    assert masks["first_last"] == [*first, *rest[1:], True]
    assert masks["prefix"] == [True, True, *rest[1:]]
    drawn = [conditioning_mask("mask", frames, 0, 0, (str(number), 0, 0)) for number in range(300)]
    assert {int(mask.sum()) for mask in drawn} == set(range(1, frames))  # never none, never all
    assert torch.stack(drawn).any(0).all()
    assert not conditioning_mask("first", 1, 0, 0, ("a", 0, 0)).any()  # an image is made whole


def test_prefixes_end_with_a_latent_frame() -> None:
    assert [prefix_of(pixels, STRIDES) for pixels in (1, 5, 9, 17)] == [1, 2, 3, 5]
    with pytest.raises(UserError, match=r"8 given frames end within a latent frame, which holds 4: give 5 or 9"):
        prefix_of(8, STRIDES)


@pytest.mark.parametrize(
    ("config", "bucket", "message"),
    [
        (
            {"prefix": 0.1, "prefix_frames": 9},
            Bucket(9, 32, 48),
            r"conditioning\.prefix gives 3 latent frames, and .* 3:",
        ),
        ({"first_last": 1.0}, Bucket(5, 32, 48), r"conditioning\.first_last gives 2 latent frames"),
        ({"prefix": 0.1, "prefix_frames": 4}, Bucket(17, 32, 48), r"4 given frames end within"),
    ],
)
def test_modes_that_leave_nothing_are_refused(config: dict[str, float], bucket: Bucket, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_conditioning(ConditioningConfig.model_validate(config), bucket, STRIDES)
    check_conditioning(ConditioningConfig(first=1.0), Bucket(1, 32, 48), STRIDES)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("conditioning.first=0.7", "conditioning.mask=0.4"), r"the shares of the modes are 1\.1 together: at most 1"),
        (("conditioning.first=0.5", "conditioning.none=0.4"), r"are 0\.9 together: with `none` they are 1"),
    ],
)
def test_shares_that_do_not_fit_are_one_line(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, *overrides)


def test_a_first_frame_encoded_alone_takes_its_place() -> None:
    latent_CThw, alone_C1hw = torch.randn(2, 3, 4, 4), torch.randn(2, 1, 4, 4)
    config, before = ConditioningConfig(first=1.0), latent_CThw.clone()

    def frames(
        stored: dict[str, torch.Tensor], rule: Conditioning = Conditioning(), epoch: int = 0
    ) -> dict[str, torch.Tensor]:
        return draw_conditioning(latent_CThw, stored, config, rule, STRIDES, 0, ("a", epoch, 0), "a.mp4")

    alone = frames({"first": alone_C1hw})
    assert torch.equal(alone["latents"][:, :1], alone_C1hw)
    assert torch.equal(alone["latents"][:, 1:], latent_CThw[:, 1:])
    assert alone["conditioning_mask"].tolist() == [True, False, False] and torch.equal(
        latent_CThw, before
    )  # the cache's bytes stay
    assert torch.equal(frames({"mean": latent_CThw})["latents"], latent_CThw)

    rule = Conditioning(("first",), "zeros", alone=True)  # as further channels
    stored = {"mean": latent_CThw, "first": alone_C1hw, "first_logvar": torch.full_like(alone_C1hw, -2.0)}
    channels = frames(stored, rule)
    assert torch.equal(channels["latents"], latent_CThw)
    assert torch.equal(channels["condition"][:, :1], alone_C1hw) and not channels["condition"][:, 1:].any()
    drawn, again, other = (frames(stored, replace(rule, drawn=True), epoch)["condition"][:, :1] for epoch in (0, 0, 1))
    assert torch.equal(drawn, again) and not torch.equal(drawn, other) and not torch.equal(drawn, alone_C1hw)
    with pytest.raises(UserError, match=r"the cache's entry of a\.mp4 has no first, which `conditioning` needs"):
        frames({"mean": latent_CThw}, rule)


def test_training_gives_frames_clean_at_time_0_without_loss(home: Path) -> None:
    task, plain = VideoDomain(config_of(home, *EVERY)), VideoDomain(config_of(home))
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorder(torch.nn.Module):
        def forward(self, x_BCThw: torch.Tensor, t: torch.Tensor, **texts: torch.Tensor) -> torch.Tensor:
            calls.append((x_BCThw, t))
            return noise_BCThw

    seen: Counter[int] = Counter()
    for batch, other in zip(first_steps(task), first_steps(plain), strict=True):
        mask_BT = batch["conditioning_mask"]
        assert "conditioning_mask" not in other and other.names == batch.names
        assert torch.equal(other["latents"], batch["latents"]) and torch.equal(other["noise"], batch["noise"])
        noise_BCThw = torch.zeros_like(batch["latents"])
        before = values_of(plain, {"model": Recorder()}, other).loss.loss_I
        got = values_of(task, {"model": Recorder()}, batch).loss
        (x_plain, t_B), (x_BCThw, t_BT) = calls[-2:]
        assert torch.equal(got.time_I, t_B) and torch.equal(t_BT, t_B[:, None].where(~mask_BT, 0.0))
        for item, mask_T in enumerate(mask_BT):
            assert torch.equal(x_BCThw[item, :, mask_T], batch["latents"][item, :, mask_T])
            assert torch.equal(x_BCThw[item, :, ~mask_T], x_plain[item, :, ~mask_T])
            # the prediction is zero: the loss is the mean square of the target over the frames that are made
            target = (batch["noise"] - batch["latents"])[item, :, ~mask_T]
            torch.testing.assert_close(got.loss_I[item], target.square().mean())
            assert bool(mask_T.any()) or abs(got.loss_I[item] - before[item]) < 1e-6 * before[item]
            seen[int(mask_T.sum())] += 1
        assert not mask_BT.all(1).any()
    assert min(seen[0], seen[1], seen[2]) > 1  # images and mode none; first; prefix and mask


def test_shapes_are_known_and_workers_give_the_same_frames(home: Path) -> None:
    alone = first_steps(VideoDomain(config_of(home, *EVERY)), 2)
    task = VideoDomain(config_of(home, *EVERY, "train.loader_workers=1"))
    worked = first_steps(task, 2)
    assert [batch["conditioning_mask"].tolist() for batch in alone] == [
        batch["conditioning_mask"].tolist() for batch in worked
    ]
    (shapes,) = task.data(RunPlace(Device("cpu", 0))).shapes(0)
    assert dict(shapes.tensors) == {name: tuple(tensor.shape) for name, tensor in alone[0].tensors.items()}
    synthetic = task.synthetic_batch(Bucket(9, 32, 48), 2, RunPlace(Device("cpu", 0)))
    assert synthetic["conditioning_mask"].shape == (2, 3) and synthetic["conditioning_mask"].dtype == torch.bool


def test_models_that_cannot_be_given_frames_say_so(home: Path) -> None:
    task = VideoDomain(config_of(home, "conditioning.first=0.5", "model.patch=[3,2,2]"))
    with pytest.raises(UserError, match=r"conditioning\.first: SoraDiT cannot be trained so: its modes are none"):
        first_steps(task)
