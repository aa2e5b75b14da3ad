"""Videos from pictures with published models: the latents are those of the official image-to-video pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmspeed import rng
from mmspeed.config import Config, make_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.media.pixel_rules import NEWEST_RULES
from mmspeed.media.reading import first_frame
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.families.base import packed, unpacked
from mmspeed.models.families.complete import completed
from mmspeed.pipelines.diffusion.conditioning_frames import held
from mmspeed.pipelines.diffusion.schedulers import generators
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.inference.conditioning_media import conditioning_latents
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.pipelines.inference.text_to_video import SamplerChoice, TextToVideo
from mmspeed.shapes import Bucket, Strides
from tests.support.covers import slow_but
from tests.support.tiny_repositories import (
    save_cogvideox,
    save_hunyuan_video15_images,
    save_hunyuan_video_images,
    save_ltx,
    save_wan,
    save_wan_images,
)
from tests.unit.pipelines.test_family_steps import filled
from tests.unit.pipelines.test_official_check import save_wan_5b

CPU = Device("cpu", 0)
SIZE = Bucket(9, 32, 48)
SIZES = {"ltx": Bucket(17, 128, 192), "cogvideox-1.5": Bucket(13, 32, 48)}  # where it is another
FPS = 16.0
PROMPT, NEGATIVE = "a rabbit runs over a green meadow", "dark"
Save = Callable[[Path], Any]


# name -> (its repository, the pictures that it is given)
CASES: dict[str, tuple[Save, tuple[str, ...]]] = {
    "wan 2.2, first": (lambda folder: save_wan(folder, in_channels=36), ("image",)),
    "wan 2.2, first and last": (lambda folder: save_wan(folder, in_channels=36), ("image", "last_image")),
    "wan 2.1, first": (save_wan_images, ("image",)),
    "wan 2.1, first and last": (lambda folder: save_wan_images(folder, last=True), ("image", "last_image")),
    "hunyuan-video-1.5, first": (save_hunyuan_video15_images, ("image",)),
    "hunyuan-video, channels": (save_hunyuan_video_images, ("image",)),
    "hunyuan-video, replaced": (lambda folder: save_hunyuan_video_images(folder, replaces=True), ("image",)),
    "wan 5b": (save_wan_5b, ("image",)),
    "ltx": (save_ltx, ("image",)),
    "cogvideox-5b": (lambda folder: save_cogvideox(folder, images=True), ("image",)),
    "cogvideox-1.5": (lambda folder: save_cogvideox(folder, "1.5", True), ("image",)),
}
OF_TEXT = {
    "WanPipeline": "WanImageToVideoPipeline",
    "LTXPipeline": "LTXImageToVideoPipeline",
}  # saved as it, the other is made


def pictures(folder: Path, names: tuple[str, ...], size: Bucket = SIZE) -> dict[str, Path]:
    """Files of pictures of the videos' own size, which need not be scaled."""
    files = {}
    for seed, name in enumerate(names):
        pixels = np.random.default_rng(seed).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
        files[name] = folder / f"{name}.png"
        Image.fromarray(pixels).save(files[name])
    return files


def config_of(folder: Path, *overrides: str) -> Config:
    tree = {
        "data": {"sources": [{"path": "videos"}], "buckets": [{"frames": 9, "height": 32, "width": 48}], "fps": FPS},
        "model": {"kind": "diffusers", "pretrained": str(folder)},
    }
    return completed(make_config(tree, overrides, origin="test"))


def pipeline_of(folder: Path, modes: tuple[str, ...]) -> TextToVideo:
    """The base as a run would have it before its first step."""
    config = config_of(folder, *(f"conditioning.{mode}={1 / len(modes)}" for mode in modes))
    return TextToVideo(config, filled(config.model, 0, 0, "cpu").eval(), load_codec(config.vae, CPU), CPU)


def requested(files: dict[str, Path], size: Bucket = SIZE) -> VideoRequest:
    shown = {name: str(path) for name, path in files.items()}
    return VideoRequest(PROMPT, NEGATIVE, 5, size.frames, size.height, size.width, **shown)


def ours(pipe: TextToVideo, request: VideoRequest, steps: int, guidance: float) -> Tensor:
    """The latents that a call decodes."""
    seen: list[Tensor] = []
    decode = pipe.codec.decode
    pipe.codec.decode = lambda latents: seen.append(latents) or decode(latents)  # type: ignore[method-assign, func-returns-value]
    list(pipe.sample([request], SamplerChoice(steps, guidance), together=1))
    pipe.codec.decode = decode  # type: ignore[method-assign]
    return seen[0]


def official(
    folder: Path, pipe: TextToVideo, request: VideoRequest, size: Bucket, noise: Tensor, steps: int, guidance: float
) -> Tensor:
    """The latents of the official pipeline, from the same noise."""
    import diffusers

    name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    pipeline: Any = getattr(diffusers, OF_TEXT.get(name, name)).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    settings: dict[str, Any] = {"height": size.height, "width": size.width, "guidance_scale": guidance}
    if "guider" in pipeline.components:  # it takes its guidance and size otherwise
        pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
        pipeline.video_processor.calculate_default_height_width = lambda *_, **__: (size.height, size.width)
        settings = {}
    if name == "HunyuanVideoImageToVideoPipeline" and not pipeline.transformer.config.guidance_embeds:
        settings |= {"guidance_scale": 1.0, "true_cfg_scale": guidance}
    settings["latents"] = noise.clone()
    if name.startswith("CogVideoX"):
        settings |= {"latents": noise.transpose(1, 2).clone(), "generator": generators(noise)}
    if name == "LTXPipeline":  # of latents that are given it takes the first frame as they have it
        conditioning = conditioning_latents([request], pipe.config, pipe.codec, size, pipe.predictor.conditioning)
        assert conditioning is not None
        given = held(noise, conditioning.held_PCThw, conditioning.named["conditioning_mask"])
        settings |= {"latents": packed(given, (1, 1, 1)), "frame_rate": FPS}
    shown = {"image": request.image, "last_image": request.last_image}
    files = {name: Image.open(path) for name, path in shown.items() if path}
    (latents,) = pipeline(
        prompt=PROMPT, negative_prompt=NEGATIVE, num_frames=size.frames, num_inference_steps=steps,
        output_type="latent", return_dict=False, **settings, **files,
    )  # fmt: skip
    if name.startswith("CogVideoX"):
        return latents.transpose(1, 2)
    return unpacked(latents, noise, (1, 1, 1)) if name == "LTXPipeline" else latents


@pytest.mark.parametrize("name", slow_but(CASES, {"wan 2.1, first and last", "wan 5b", "ltx", "cogvideox-1.5"}))
def test_samples_are_those_of_the_pipeline(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 and 8 steps, with and without guidance. Some pipelines draw the image's latent; ours is the mean, and so is theirs here."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean)
    save, names = CASES[name]
    save(tmp_path / "repository")
    size = SIZES.get(name, SIZE)
    request = requested(pictures(tmp_path, names, size), size)
    pipe = pipeline_of(tmp_path / "repository", ("first_last",) if len(names) == 2 else ("first",))
    shape = (pipe.codec.channels, *pipe.codec.strides.latent(size))
    noise = rng.normal(shape, 5, "sample", PROMPT)[None]
    for steps, guidance in ((3, 4.0), (8, 1.0)):
        result = ours(pipe, request, steps, guidance)
        assert (result - noise).abs().max() > 0.1  # it went somewhere
        truth = official(tmp_path / "repository", pipe, request, size, noise, steps, guidance)
        torch.testing.assert_close(result[:, :, -truth.shape[2] :], truth, atol=1e-5, rtol=1e-5)


def test_a_model_that_is_always_given_frames_says_what_it_needs(tmp_path: Path) -> None:
    save_wan(tmp_path / "wan", in_channels=36)
    pipe = pipeline_of(tmp_path / "wan", ("first",))
    with pytest.raises(
        UserError, match=r"^the model of this run makes videos of given frames alone: give --image, or a .jsonl"
    ):
        pipe.sizes([VideoRequest("a")])
    with pytest.raises(UserError, match=r"--last-image: the run was trained without conditioning\.first_last"):
        pipe.sizes([VideoRequest("a", image="a.png", last_image="b.png")])
    config = config_of(tmp_path / "wan", "conditioning.first=1", "validate.prompts=[a]")
    with pytest.raises(UserError, match=r"^validate\.prompts: the model makes videos of given frames alone"):
        VideoDomain(config).use(EncoderShapes(16, Strides(4, 8), 16)).build()


# name -> (its repository, the argument of the transformer's call that holds what an encoder makes of the whole picture)
WHOLE: dict[str, tuple[Save, str]] = {
    "wan 2.1": (save_wan_images, "encoder_hidden_states_image"),
    "hunyuan-video": (save_hunyuan_video_images, "encoder_hidden_states"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_encoders_are_given_the_picture_as_it_is(tmp_path: Path, name: str) -> None:
    """A picture of another shape than the video's: what is embedded is not what was cut for the codec, as in the pipeline."""
    save, argument = WHOLE[name]
    save(tmp_path / "repository")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    files = {"image": tmp_path / "image.png"}
    pipe = pipeline_of(tmp_path / "repository", ("first",))
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs[argument])

    pipe.model.register_forward_pre_hook(keep, with_kwargs=True)
    ours(pipe, requested(files), 1, 1.0)
    diffusers_call(tmp_path / "repository", files, keep)
    mine, truth = seen[0], seen[-1]
    torch.testing.assert_close(mine, truth[:, : mine.shape[1]], atol=1e-6, rtol=1e-5)
    (tmp_path / "cut").mkdir()
    Image.fromarray(first_frame(tmp_path / "image.png", SIZE, NEWEST_RULES)).save(tmp_path / "cut" / "image.png")
    ours(pipe, requested({"image": tmp_path / "cut" / "image.png"}), 1, 1.0)
    assert (seen[-1] - mine).abs().max() > 1e-4


def diffusers_call(folder: Path, files: dict[str, Path], keep: Callable[..., None]) -> None:
    """A step of the official pipeline, whose transformer's arguments `keep` is called with."""
    import diffusers

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    pipeline(
        prompt=PROMPT, height=SIZE.height, width=SIZE.width, num_frames=SIZE.frames, num_inference_steps=1, guidance_scale=1.0,
        output_type="latent", **{name: Image.open(path) for name, path in files.items()},
    )  # fmt: skip
