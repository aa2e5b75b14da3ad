"""Videos from an image of published models: our loop gives the latents of the family's official image-to-video pipeline.

Wan with 36 channels and HunyuanVideo are in test_image_sampling.py.

Legend: B batch, C channels, T h w latent.
"""

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
from mmspeed.config import make_config
from mmspeed.device import Device
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.families.base import packed, unpacked
from mmspeed.models.families.complete import completed
from mmspeed.models.sections import call_of, with_weights
from mmspeed.pipelines.diffusion.conditioning_frames import held
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.diffusion.predictor import make_predictor
from mmspeed.pipelines.diffusion.schedulers import family_sampler, generators
from mmspeed.pipelines.inference.anchor_media import conditioning_latents
from mmspeed.pipelines.inference.generate import SampleSettings, sample_together
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.protocols import TextEntry, source_of
from tests.support.covers import slow_but
from tests.support.tiny_repositories import save_cogvideox, save_ltx, save_wan

CPU, FPS, WIDTH = Device("cpu", 0), 25.0, 16


def save_wan_5b(folder: Path) -> Path:
    save_wan(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "expand_timesteps": True}))
    return folder


# name -> (repository, pipeline from images, rows of a caption that the model takes)
FAMILIES: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "wan 5b": (save_wan_5b, "WanImageToVideoPipeline", 512),
    "ltx": (save_ltx, "LTXImageToVideoPipeline", 128),
    "cogvideox-5b": (lambda folder: save_cogvideox(folder, images=True), "CogVideoXImageToVideoPipeline", 226),
    "cogvideox-1.5": (lambda folder: save_cogvideox(folder, "1.5", True), "CogVideoXImageToVideoPipeline", 226),
}
CASES = [(name, steps, guidance) for name in FAMILIES for steps, guidance in ((3, 4.0), (8, 1.0))]
COVER = {
    ("ltx", 3, 4.0), ("wan 5b", 3, 4.0), ("cogvideox-1.5", 8, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, COVER), ids=str)
def test_samples_from_images_are_those_of_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, float]
) -> None:
    name, steps, guidance = case
    import diffusers
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    # some pipelines draw the image's latent; ours is the mean
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean)
    save, kind, rows = FAMILIES[name]
    save(tmp_path / "model")
    latent = (4, 4, 6) if name == "cogvideox-1.5" else (3, 4, 6)
    config = completed(
        make_config(
            {
                "data": {"sources": [{"path": "v"}], "buckets": [{"frames": 1, "height": 64, "width": 96}], "fps": FPS},
                "model": {"kind": "diffusers", "pretrained": str(tmp_path / "model")},
                "conditioning": {"first": 1.0},
            }
        )
    )
    codec = load_codec(config.vae, CPU)
    size = codec.strides.pixels(latent)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size.height, size.width, 3), np.uint8))
    picture.save(tmp_path / "first.png")
    noise = torch.randn((1, codec.channels, *latent), generator=torch.Generator().manual_seed(3))
    texts = [rng.normal((rows, WIDTH), 0, "text", i) for i in (0, 1)]

    model = with_weights(config.model, 0, 0, "cpu")
    materialize(model, torch.device("cpu"))
    source = source_of(model)
    assert source is not None
    read_weights(model, source)
    model.eval()
    predictor = make_predictor(model, config.objective, codec.channels, WIDTH, call_of(config.model))
    request = VideoRequest("a", image=str(tmp_path / "first.png"))
    frames = conditioning_latents([request], config, codec, size, predictor.conditioning)
    assert frames is not None
    objective = make_objective(config.objective, family_sampler(config)).sized(size, predictor.tokens(latent))
    positive, negative = map(TextEntry, texts)
    settings = SampleSettings(steps, guidance, "family", 0)
    actual = sample_together(
        model, objective, [positive], [negative], noise, settings, CPU, None, predictor, FPS, codec.strides, frames
    )

    pipeline: Any = getattr(diffusers, kind)(**components(tmp_path / "model", kind))
    truth = official(pipeline, name, noise, frames.latents_PCThw, frames.mask_PT, picture, texts,
                     {"height": size.height, "width": size.width, "num_frames": size.frames, "num_inference_steps": steps},
                     guidance)  # fmt: skip
    assert (actual - noise).abs().max() > 0.1
    torch.testing.assert_close(actual[:, :, -truth.shape[2] :], truth, atol=1e-5, rtol=1e-5)


def components(folder: Path, kind: str) -> dict[str, Any]:
    """The parts of a repository, by the pipeline from images, which may have been saved as one from text."""
    import diffusers

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    parts: dict[str, Any] = dict(pipeline.components)
    if kind.startswith("Wan"):
        parts |= {"image_processor": None, "image_encoder": None, "transformer_2": None}
        parts["expand_timesteps"] = pipeline.config.expand_timesteps
    return parts


def official(
    pipeline: Any,
    name: str,
    noise: Tensor,
    clean: Tensor,
    mask: Tensor,
    picture: Image.Image,
    texts: list[Tensor],
    arguments: dict[str, Any],
    guidance: float,
) -> Tensor:
    """Latents (B, C, T, h, w) of the official pipeline, from the same noise, image and captions."""
    pipeline.set_progress_bar_config(disable=True)
    arguments |= {"output_type": "latent", "return_dict": False, "image": picture, "guidance_scale": guidance}
    arguments |= {"prompt_embeds": texts[0][None], "negative_prompt_embeds": texts[1][None], "latents": noise.clone()}
    if name.startswith("cogvideox"):
        arguments |= {"latents": noise.transpose(1, 2).clone(), "generator": generators(noise)}
    if name == "ltx":  # of latents that are given it takes the first frame as they have it
        ones = torch.ones(1, texts[0].shape[0], dtype=torch.bool)
        arguments |= {"latents": packed(held(noise, clean, mask), (1, 1, 1)), "frame_rate": FPS}
        arguments |= {"prompt_attention_mask": ones, "negative_prompt_attention_mask": ones}
    result: Tensor = pipeline(**arguments)[0]
    if name.startswith("cogvideox"):
        return result.transpose(1, 2)
    return unpacked(result, noise, (1, 1, 1)) if name == "ltx" else result
