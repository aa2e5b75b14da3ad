"""Published models that are given frames: calls equal to the official image-to-video pipelines', and training from a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmspeed import rng
from mmspeed.__main__ import main
from mmspeed.cli.init import write_config
from mmspeed.config import Config, load_config
from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.config.schema import DiffusersVaeConfig
from mmspeed.data import DatasetCache
from mmspeed.data.loading.collate import draw_conditioning
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.codecs.frames import frame_latents, with_grey
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.families import FAMILIES
from mmspeed.models.families.ltx import LtxCall
from mmspeed.models.families.wan import WanCall
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.text_to_video import TextToVideo
from mmspeed.pipelines.tasks.video import VideoTask
from mmspeed.protocols import Conditions, RunPlace
from mmspeed.shapes import Strides
from tests.support.runs import losses
from tests.support.tiny_repositories import save_cogvideox, save_hunyuan_video, save_ltx, save_wan

FRAMES, HEIGHT, WIDTH = 9, 32, 64
SMALL = (
    "data.limit=4", "data.buckets=[{frames: 13, height: 32, width: 48}]", "data.val_fraction=0", "validate.prompts=[]",
    "train.steps=2", "train.log_every=1", "train.ema_decay=null",
)  # fmt: skip


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def pixels(*pictures: Image.Image) -> Tensor:
    frames_FHWC = torch.from_numpy(np.stack([np.asarray(each) for each in pictures])).float()
    return (frames_FHWC / 127.5 - 1).permute(3, 0, 1, 2)[None]


def first_call(pipeline: Any, text_BLD: Tensor, **arguments: Any) -> dict[str, Any]:
    """The arguments of the transformer's first call in an official pipeline."""
    seen: list[dict[str, Any]] = []
    handle = pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        prompt_embeds=text_BLD, num_frames=FRAMES, height=HEIGHT, width=WIDTH, num_inference_steps=2, guidance_scale=1.0,
        output_type="latent", **arguments,
    )  # fmt: skip
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("last", [False, True])
def test_wan_conditions_are_the_pipelines(tmp_path: Path, last: bool) -> None:
    from diffusers import WanImageToVideoPipeline, WanPipeline

    save_wan(tmp_path / "wan", in_channels=36)
    parts = WanPipeline.from_pretrained(tmp_path / "wan").components
    official = WanImageToVideoPipeline(
        **{**parts, "image_processor": None, "image_encoder": None, "transformer_2": None}
    )
    noise, text_BLD = rng.normal((1, 16, 3, 4, 8), 0, "x"), rng.normal((1, 512, 16), 0, "text")
    first, end = picture(0), picture(1)
    seen = first_call(official, text_BLD, image=first, latents=noise, **({"last_image": end} if last else {}))
    codec = load_codec(
        DiffusersVaeConfig(kind="diffusers", pretrained=str(tmp_path / "wan"), subfolder="vae"), Device("cpu", 0)
    )
    video = with_grey(pixels(first, *[picture(2)] * (FRAMES - 2), end), last=last)
    condition = codec.encode(video).mean_BCThw
    anchors_BT = torch.tensor([[True, False, last]])
    conditions = Conditions(
        text_BLD, torch.ones(1, 512, dtype=torch.bool), named={"conditioning_mask": anchors_BT, "condition": condition}
    )
    config, call = dict(official.transformer.config), WanCall()
    got = call.call(config, noise, seen["timestep"] / 1000, conditions)
    assert got["hidden_states"].shape == seen["hidden_states"].shape == (1, 36, 3, 4, 8)
    assert torch.equal(got["hidden_states"][:, :20], seen["hidden_states"][:, :20])  # noisy latents and masks
    torch.testing.assert_close(got["hidden_states"], seen["hidden_states"], atol=1e-6, rtol=1e-6)
    assert condition[:, :, 1:].abs().max() > 0.1  # grey frames are no zeros in latents
    modes = call.conditioning(config)
    assert modes.modes == ("first", "first_last") and modes.how == "grey"
    with pytest.raises(UserError, match="set the section `conditioning`"):
        call.call(config, noise, torch.ones(1), Conditions(text_BLD, torch.ones(1, 512, dtype=torch.bool)))


def test_a_time_for_each_token_is_0_where_a_frame_is_given(tmp_path: Path) -> None:
    """Wan 2.2 5B and LTX: the clean latent in the first frame, times of tokens as the pipelines'."""
    from diffusers import LTXImageToVideoPipeline, LTXPipeline, WanImageToVideoPipeline, WanPipeline

    anchors_BT = torch.tensor([[True, False, False]])
    save_wan(tmp_path / "wan")
    parts = {**WanPipeline.from_pretrained(tmp_path / "wan").components, "image_processor": None, "image_encoder": None}
    official: Any = WanImageToVideoPipeline(**{**parts, "transformer_2": None}, expand_timesteps=True)
    text_BLD = rng.normal((1, 512, 16), 0, "text")
    seen = first_call(official, text_BLD, image=picture(0))
    mask_BL = torch.ones(1, 512, dtype=torch.bool)
    time = seen["timestep"].max().float()[None] / 1000
    conditions = Conditions(text_BLD, mask_BL, named={"conditioning_mask": anchors_BT})
    call = WanCall(expand_timesteps=True)
    got = call.call(dict(official.transformer.config), seen["hidden_states"], time, conditions)
    torch.testing.assert_close(got["timestep"], seen["timestep"].float(), atol=1e-4, rtol=1e-6)
    assert (got["timestep"][0] == 0).tolist() == [True] * 8 + [False] * 16

    save_ltx(tmp_path / "ltx")
    official = LTXImageToVideoPipeline(**LTXPipeline.from_pretrained(tmp_path / "ltx").components)
    text_BLD, mask_BL = rng.normal((1, 128, 16), 0, "text"), torch.ones(1, 128, dtype=torch.bool)
    frames = {"num_frames": 17, "height": 32, "width": 64}
    seen_calls: list[dict[str, Any]] = []
    official.transformer.register_forward_pre_hook(lambda m, a, kwargs: seen_calls.append(kwargs), with_kwargs=True)
    official.set_progress_bar_config(disable=True)
    official(
        image=picture(0), prompt_embeds=text_BLD, prompt_attention_mask=mask_BL, num_inference_steps=2, guidance_scale=1.0,
        output_type="latent", frame_rate=24, **frames,
    )  # fmt: skip
    seen = seen_calls[0]
    x_BCThw = seen["hidden_states"].transpose(1, 2).unflatten(2, (3, 1, 2))
    conditions = Conditions(
        text_BLD, mask_BL, fps_B=torch.tensor([24.0]), strides=Strides(8, 32), named={"conditioning_mask": anchors_BT}
    )
    time = seen["timestep"].max().float()[None] / 1000
    got = LtxCall().call(dict(official.transformer.config), x_BCThw, time, conditions)
    assert torch.equal(got["hidden_states"], seen["hidden_states"])
    torch.testing.assert_close(got["timestep"], seen["timestep"].float(), atol=1e-4, rtol=1e-6)
    assert (got["timestep"][0] == 0).tolist() == [True] * 2 + [False] * 4


@pytest.mark.parametrize("kind", ["latent_concat", "token_replace"])
def test_hunyuan_video_is_given_the_first_frame_as_its_pipeline_gives_it(tmp_path: Path, kind: str) -> None:
    from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline

    concat = kind == "latent_concat"
    changes = {"image_condition_type": kind, "guidance_embeds": not concat, "in_channels": 33 if concat else 16}
    save_hunyuan_video(tmp_path / "hunyuan", **changes)
    parts: Any = HunyuanVideoPipeline.from_pretrained(tmp_path / "hunyuan").components
    official: Any = HunyuanVideoImageToVideoPipeline(**parts, image_processor=None)
    noise, text_BLD, pooled_BD = (
        rng.normal(size, 0, name) for size, name in (((1, 16, 3, 4, 8), "x"), ((1, 6, 16), "text"), ((1, 16), "pooled"))
    )
    mask_BL = torch.arange(6)[None] < 4
    seen = first_call(
        official,
        text_BLD,
        image=picture(0),
        latents=noise,
        pooled_prompt_embeds=pooled_BD,
        prompt_attention_mask=mask_BL,
    )
    codec = load_codec(
        DiffusersVaeConfig(kind="diffusers", pretrained=str(tmp_path / "hunyuan"), subfolder="vae"), Device("cpu", 0)
    )
    call: Any = FAMILIES["HunyuanVideoTransformer3DModel"].call_of({"_class_name": type(official).__name__}, {}.get)
    config = dict(official.transformer.config)
    rule = call.conditioning(config)
    assert rule.modes == ("first",) and rule.how == ("zeros" if concat else "replace")
    stored = {
        name: each[0] for name, each in frame_latents(pixels(picture(0)), rule.stored(["first"]), codec.encode).items()
    }
    assert list(stored) == ["first"]  # this codec mixes frames: the first one is encoded alone
    image_latent = stored["first"].expand(-1, 3, -1, -1)
    start = noise[0] * torch.tensor(0.999) + image_latent * (1 - torch.tensor(0.999))  # what the pipeline begins with
    anchored = draw_conditioning(start, stored, ConditioningConfig(first=1.0), rule, codec.strides, 0, ("a", 0, 0), "a")
    assert anchored.mask_T.tolist() == [True, False, False] and (anchored.condition_CThw is None) != concat
    named = {"conditioning_mask": anchored.mask_T[None]} | (
        {"condition": anchored.condition_CThw[None]} if concat else {}
    )  # type: ignore[index]
    conditions = Conditions(text_BLD, mask_BL, pooled_BD, named=named)
    got = call.call(config, anchored.latent_CThw[None], seen["timestep"].float() / 1000, conditions)
    torch.testing.assert_close(got["hidden_states"], seen["hidden_states"], atol=1e-6, rtol=1e-6)
    if concat:
        assert torch.equal(got["hidden_states"][:, 16:], seen["hidden_states"][:, 16:])
    for name in ("timestep", "guidance", "pooled_projections", "encoder_hidden_states"):
        assert name not in got or torch.equal(got[name], seen[name]), name
    assert torch.equal(got["encoder_attention_mask"], seen["encoder_attention_mask"].bool())


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "own.yaml", (*SMALL, *overrides))


def test_an_image_to_video_model_is_trained_from_a_cache(tmp_path: Path) -> None:
    """The first epoch encodes the condition of each clip, and a model that is always given frames says so."""
    save_wan(tmp_path / "tiny-wan", in_channels=36)
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny-wan"))
    place = RunPlace(Device("cpu", 0))
    config = config_of(tmp_path, "conditioning.first=0.5", "conditioning.first_last=0.5")
    TrainPipeline(config, online=True).run()
    assert len(losses(config)) == 2
    task = VideoTask(config)
    task.open(place)
    (batch, *_) = (batch for step in task.data(place).steps(0, 1) for batch in step.batches)
    assert batch["condition"].shape == batch["latents"].shape
    for mask_T, condition_CThw in zip(batch["conditioning_mask"], batch["condition"], strict=True):
        assert bool(mask_T[0]) and condition_CThw[:, 1:].abs().max() > 0.1
    cache = DatasetCache(config.cache_root)
    stored = cache.latent(cache.split("train")[0].latent_keys[0])
    assert {"mean", "grey_first", "grey_first_last"} <= set(stored)
    with pytest.raises(UserError, match=r"is always given frames: its modes are first, first_last"):
        VideoTask(config_of(tmp_path, "conditioning.first=0")).use(task.inputs).build()


@pytest.mark.slow
def test_the_first_frame_alone_is_stored_for_a_codec_that_mixes_frames(tmp_path: Path) -> None:
    """CogVideoX: the image's latent is drawn from its posterior by name, other frames of the condition are zeros."""
    save_cogvideox(tmp_path / "tiny", "5b", images=True)
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny"))
    assert load_config(tmp_path / "own.yaml").conditioning.shares == {"first": 1.0}  # as the model always is
    config = config_of(tmp_path, "train.steps=1", "data.limit=2")
    TrainPipeline(config, online=True).run()
    assert len(losses(config)) == 1
    task = VideoTask(config)
    task.open(RunPlace(Device("cpu", 0)))
    (batch, *_) = (batch for step in task.data(RunPlace(Device("cpu", 0))).steps(0, 1) for batch in step.batches)
    cache = DatasetCache(config.cache_root)
    stored = cache.latent(cache.split("train")[0].latent_keys[0])
    assert {"mean", "logvar", "first", "first_logvar"} <= set(stored)
    assert not batch["condition"][:, :, 1:].any() and batch["conditioning_mask"][:, 0].all()
    assert not torch.equal(batch["condition"][:, :, 0], batch["latents"][:, :, 0])  # all frames are noisy and count
    again = next(batch for step in task.data(RunPlace(Device("cpu", 0))).steps(0, 1) for batch in step.batches)
    assert torch.equal(again["condition"], batch["condition"])

    picture(0).save(tmp_path / "one.png")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "image": "one.png", "seed": 1}) + "\n")
    common = ["sample", str(config.run_dir), "--device", "cpu", "--steps", "2", "--weights", "model"]
    assert main([*common, "--prompts", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "v.mp4")]) == 0
    assert (tmp_path / "v-0001.mp4").exists()
    pipe = TextToVideo.from_run(config.run_dir, device="cpu")
    with pytest.raises(UserError, match=r"the model of this run makes videos of given frames alone: give --image"):
        pipe("a", steps=2)
    (one,) = pipe("a", steps=2, image=tmp_path / "one.png")
    picture(1).save(tmp_path / "two.png")
    (two,) = pipe("a", steps=2, image=tmp_path / "two.png")
    assert (one.frames_FHWC != two.frames_FHWC).any()
