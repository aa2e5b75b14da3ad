"""Official pipelines of tiny repositories, called with noise of ours, and runs of such repositories.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.config import make_config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.initialize import materialize, read_weights
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.models.adapters import adapter_values
from mmspeed.models.families.base import packed, unpacked
from mmspeed.models.sections import repository_of, with_weights
from mmspeed.pipelines.diffusion.schedulers import generators
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import source_of
from mmspeed.rng import VERSION
from mmspeed.shapes import Bucket, Strides

FPS = 25.0
# name -> strides of the codec, latent channels, patch of packed latents
FACTS: dict[str, tuple[Strides, int, tuple[int, int, int] | None]] = {
    "wan": (Strides(4, 8), 16, None),
    "ltx": (Strides(8, 32), 128, (1, 1, 1)),
    "cogvideox-5b": (Strides(4, 8), 16, None),
    "cogvideox-2b": (Strides(4, 8), 16, None),
    "hunyuan-video": (Strides(4, 8), 16, None),
    "mochi": (Strides(6, 8), 12, None),
    "flux": (Strides(1, 8), 16, (1, 2, 2)),
    "qwen-image": (Strides(1, 8), 16, (1, 2, 2)),
    "hunyuan-video-1.5": (Strides(4, 16), 32, None),
}
IMAGES = ("flux", "qwen-image")
PROMPT, NEGATIVE = "a rabbit runs over a green meadow", "dark"


def shape_of(name: str) -> tuple[Bucket, tuple[int, int, int, int]]:
    """(pixels, latent (C, T, h, w)) of the sampled videos."""
    strides, channels, _ = FACTS[name]
    latent = (1, 8, 8) if name in IMAGES else (3, 4, 6)
    return strides.pixels(latent), (channels, *latent)


def load_official(folder: Path) -> Any:
    """The pipeline of a repository, from its folder."""
    import diffusers

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def place_alike(*pipelines: Any) -> None:
    """Copy all parameters of official pipelines: products round by the place of weights in memory, which files leave at any byte."""
    for pipeline in pipelines:
        for module in (part for part in pipeline.components.values() if isinstance(part, nn.Module)):
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()


def narrowed(module: Any, name: str, width: int) -> Any:
    """A conversion of HunyuanVideo's names in diffusers for models of this width; diffusers' own knows that of the published model alone."""
    scope = dict(vars(module))
    text = inspect.getsource(getattr(module, name)).replace("hidden_size = 3072", f"hidden_size = {width}")
    exec(text, scope)  # noqa: S102  # diffusers' own text
    return scope[name]


def official_latents(
    pipeline: Any, name: str, noise: Tensor, steps: int, guidance: float, negative: str = NEGATIVE
) -> Tensor:
    """Latents (B, C, T, h, w) of a pipeline, from this noise."""
    bucket, _ = shape_of(name)
    arguments: dict[str, Any] = {"height": bucket.height, "width": bucket.width, "num_inference_steps": steps}
    arguments |= {"output_type": "latent", "return_dict": False, **guided_arguments(pipeline, name, guidance)}
    patch = FACTS[name][2]
    latents = noise if patch is None else packed(noise, patch)
    if name.startswith("cogvideox"):
        latents = noise.transpose(1, 2)
    if name not in IMAGES:
        arguments["num_frames"] = bucket.frames
    if name == "ltx":
        arguments["frame_rate"] = FPS
    if name not in ("flux", "hunyuan-video"):  # which are given their guidance
        arguments["negative_prompt"] = negative
    if name == "wan":
        arguments["max_sequence_length"] = 512
    arguments["generator"] = generators(noise)  # of a scheduler that draws noise in its steps
    (result,) = pipeline(PROMPT, latents=latents.clone(), **arguments)
    if name.startswith("cogvideox"):
        return result.transpose(1, 2)
    return result if patch is None else unpacked(result, noise, patch)


def guided_arguments(pipeline: Any, name: str, guidance: float) -> dict[str, Any]:
    """The guidance as each pipeline takes it: by an argument, or from an object of its own."""
    if name == "qwen-image":
        return {"true_cfg_scale": guidance}
    if name == "hunyuan-video-1.5":
        pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
        return {}
    return {"guidance_scale": guidance}


def made_run(folder: Path, base: Path, frozen: int, **sections: Any) -> tuple[Path, nn.Module]:
    """A run's folder with one checkpoint of the repository's model, moved; its first `frozen` parameters do not train.

    Adapters have random numbers. sections: more of the config.
    """
    tree: dict[str, Any] = {
        "name": "own",
        "output": str(folder / "runs"),
        "data": {"sources": [{"path": str(folder)}], "buckets": [{"frames": 9, "height": 32, "width": 48}]},
        "model": {"kind": "diffusers", "pretrained": str(base)},
        "train": {"ema_decay": None},
        **sections,
    }
    config = make_config(tree, (), origin="test")
    assert isinstance(config.model, PublishedModelConfig)
    model = with_weights(config.model, 16, 16, "meta")
    source = source_of(model)
    assert source is not None
    materialize(model, torch.device("cpu"))
    read_weights(model, source)
    seeded = torch.Generator().manual_seed(1)
    for parameter, value in adapter_values(model, seed=0):
        parameter.data.copy_(value if value.any() else 0.3 * torch.randn(value.shape, generator=seeded))
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
    run = RunFolder(config.run_dir)
    info = {"base": {"model": repository_of(config.model).fingerprint}, "latent_channels": 16, "text_width": 16}
    run.write_start(config, {**info, "versions": {"generator": VERSION}}, {})
    CheckpointManager(run.checkpoints).save(1, TrainingState(model), blocking=True)
    return run.root, model
