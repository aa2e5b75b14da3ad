"""`TextToVideo`: a trained run as a function from prompts to videos.

Prompts are encoded once, validation prompts are stored in the run's folder, and the encoder is freed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmspeed.compute.sparse.controller import SparsityController
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Bucket, Config
from mmspeed.config.schema import TextConfig
from mmspeed.data.cache.keys import number_duplicates
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import best, latest, load_weights, step_name, steps_in
from mmspeed.models import SoraDiT, build_model
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.text.encoders import load_text_encoder, text_identity
from mmspeed.parallel import autocast
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.inference.generate import SampleSettings, generate_latents
from mmspeed.pipelines.inference.media import Video, from_model_range
from mmspeed.pipelines.run.run_folder import RunFolder, sync_file
from mmspeed.protocols import CountsFlops, TextEntry, VideoCodec
from mmspeed.rng import Seed
from mmspeed.shapes import Strides


def encode_prompts(prompts: list[str], config: TextConfig, device: Device) -> list[TextEntry]:
    """The text entries of prompts, on the CPU; the encoder is freed afterwards."""
    encoder = load_text_encoder(config, device)
    entries = encoder.encode(prompts)
    del encoder
    gc.collect()
    device.empty_cache()
    return entries


def stored_prompts(path: Path, prompts: list[str], config: TextConfig, device: Device) -> list[TextEntry]:
    """The results of `encode_prompts`, stored in a safetensors file that is reused while prompts and encoder stay the same."""
    wanted = {"prompts": "\x1f".join(prompts), "encoder": text_identity(config)}
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata() == wanted:
                names = set(file.keys())
                return [
                    TextEntry(
                        file.get_tensor(str(index)),
                        file.get_tensor(f"{index}.pooled") if f"{index}.pooled" in names else None,
                    )
                    for index in range(len(prompts))
                ]
    entries = encode_prompts(prompts, config, device)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    tensors = {str(i): e.embeds_LD.float().contiguous() for i, e in enumerate(entries)}
    tensors |= {f"{i}.pooled": e.pooled_D.float().contiguous() for i, e in enumerate(entries) if e.pooled_D is not None}
    save_file(tensors, temporary, metadata=wanted)
    sync_file(temporary)
    os.replace(temporary, path)
    return entries


def video_shape(
    config: Config,
    strides: Strides,
    model: CountsFlops,
    frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Bucket:
    """The requested size, completed from `sample` in the config and then from its first video bucket.

    Raises UserError when the codec or the model cannot make that size.
    """
    first = next((b for b in config.buckets if not b.is_image), config.buckets[0])
    bucket = Bucket(
        frames or config.sample.frames or first.frames,
        height or config.sample.height or first.height,
        width or config.sample.width or first.width,
    )
    try:
        model.tokens(strides.latent(bucket))
    except ValueError as error:
        raise UserError(f"a video of {bucket} (frames x height x width) cannot be made: {error}") from None
    return bucket


def sampler_settings(
    config: Config,
    steps: int | None,
    guidance: float | None,
    sampler: str | None,
    seed: int,
    guidance_rescale: float | None = None,
) -> SampleSettings:
    """The requested settings, completed from `sample` in the config. Raises UserError for a rescale outside of 0 to 1."""
    rescale = config.sample.guidance_rescale if guidance_rescale is None else guidance_rescale
    if not 0 <= rescale <= 1:
        raise UserError(f"sample.guidance_rescale is {rescale}: use 0 (none) to 1")
    return SampleSettings(
        steps=steps or config.sample.steps,
        guidance=config.sample.guidance if guidance is None else guidance,
        sampler=sampler or config.sample.sampler,
        seed=seed,
        rescale=rescale,
    )


def clean_prompt(prompt: str) -> str:
    """A prompt from the command line with bytes that are no UTF-8 replaced by characters that a tokenizer accepts."""
    return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def find_checkpoint(folder: RunFolder, which: str | int) -> Path:
    """The checkpoint `latest`, `best`, or of a step. Raises UserError when there is none, with the steps that there are."""
    steps = steps_in(folder.checkpoints)
    if not steps:
        raise UserError(f"{folder.root} has no checkpoint yet")
    if which in ("latest", "best"):
        path = latest(folder.checkpoints) if which == "latest" else best(folder.checkpoints)
        if path is None:
            raise UserError(f"{folder.root} has no {which} checkpoint: no held-out loss was taken")
        return path
    if not str(which).isdigit() or int(which) not in steps:
        raise UserError(f"{folder.root} has no checkpoint {which!r}: there are latest, best and the steps {steps}")
    return folder.checkpoints / step_name(int(which))


class TextToVideo:
    """A text-to-video pipeline with a run's weights.

    pipe = TextToVideo.from_run("runs/my-run")
    pipe("a rabbit in a meadow", seed=1)[0].save("rabbit.mp4")
    """

    def __init__(
        self, config: Config, model: SoraDiT, codec: VideoCodec, device: Device, generator: int | None = None
    ) -> None:
        self.config, self.model, self.codec, self.device = config, model, codec, device
        self.generator = generator  # of the noise, a version of `mmspeed.rng`; None: the newest
        self.objective = make_objective(config.objective)

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        checkpoint: str | int = "latest",
        weights: Literal["ema", "model"] = "ema",
        device: str = "auto",
    ) -> TextToVideo:
        """The pipeline of a run's checkpoint (`latest`, `best` or a step), with its `ema` or `model` weights.

        Raises UserError when the run, the checkpoint or its EMA is missing.
        """
        folder = RunFolder.open(run)
        config, info = folder.config(), folder.info()
        if weights not in ("ema", "model"):
            raise UserError(f"weights are 'ema' or 'model', not {weights!r}")
        if weights == "ema" and config.train.ema_decay is None:
            weights = "model"  # a run without a moving average has nothing else
        chosen = pick(device)
        chosen.activate()
        path = find_checkpoint(folder, checkpoint)
        model = build_model(config.model, info["latent_channels"], info["text_width"], device="meta").to_empty(
            device="cpu"
        )
        for layer in clustered_layers(model).values():
            layer.reset()
        step = load_weights(path, model, weights)["step"]
        sparsity = SparsityController.of(model)
        if sparsity is not None:
            sparsity.before_step(step)  # dense, if the checkpoint is of the dense steps
        model.to(chosen.torch_device).eval()
        if config.device.dtype != "float32":
            autocast(model, parse_dtype(config.device.dtype))
        codec = load_codec(config.vae, chosen, folder.codec_weights if config.vae.kind == "linear" else None)
        return cls(config, model, codec, chosen, folder.generator())

    def size(self, frames: int | None = None, height: int | None = None, width: int | None = None) -> Bucket:
        """The size of the videos that a call with these arguments makes. Raises UserError when it cannot be made."""
        return video_shape(self.config, self.codec.strides, self.model, frames, height, width)

    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        negative_prompt: str | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        guidance_rescale: float | None = None,
        sampler: str | None = None,
        seed: int = 0,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[Video]:
        """Sample a video for each prompt. Missing arguments are taken from the run's config.

        The same seed, prompt and settings give the same video. Raises UserError for a size that the codec cannot make or the timestep
        shift does not know, for a sampler of the other objective, and for a rescale outside of 0 to 1.
        """
        prompts = [clean_prompt(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        if not prompts:
            raise UserError("no prompt was given")
        config = self.config
        bucket = self.size(frames, height, width)
        settings = sampler_settings(config, steps, guidance, sampler, Seed(seed, self.generator), guidance_rescale)
        latent = self.codec.strides.latent(bucket)
        objective = self.objective.sized(bucket, self.model.tokens(latent))
        negative = config.sample.negative_prompt if negative_prompt is None else negative_prompt
        *texts, negative_entry = encode_prompts([*prompts, negative], config.text, self.device)
        latents_PCThw = generate_latents(
            self.model,
            objective,
            texts,
            negative_entry,
            number_duplicates(prompts),  # the same prompt twice gives two videos
            (self.codec.channels, *latent),
            settings,
            self.device,
            on_step,
        )
        return decode_videos(self.codec, latents_PCThw, config.data.fps or 24.0)


def decode_videos(codec: VideoCodec, latents_PCThw: torch.Tensor, fps: float) -> list[Video]:
    """The video of each latent."""
    return [from_model_range(codec.decode(latent[None])[0], fps) for latent in latents_PCThw]
