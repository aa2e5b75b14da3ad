"""`TextToVideo`: a trained run as a function from prompts to videos.

Prompts are encoded once, validation prompts are stored in the run's folder, and the encoder is freed.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Bucket, Config, RunConfig
from mmspeed.config.schema import PublishedModelConfig, TextConfig
from mmspeed.data.cache.files import private_file
from mmspeed.device import Device, pick
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families.complete import completed
from mmspeed.models.image_encoder import load_image_encoder
from mmspeed.models.sections import call_of, opened_of
from mmspeed.models.text.encoders import entries_beside, load_text_encoder, sees_pictures, text_identity, text_width
from mmspeed.pipelines.diffusion.experts import OtherExpert
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.diffusion.predictor import make_predictor
from mmspeed.pipelines.diffusion.schedulers import family_sampler
from mmspeed.pipelines.inference.conditioning_media import (
    ConditioningLatents,
    check_request,
    conditioning_latents,
    pictures_of,
)
from mmspeed.pipelines.inference.generate import SampleSettings, sample_together
from mmspeed.pipelines.inference.media import RATE, Video, from_model_range
from mmspeed.pipelines.inference.prompts import VideoRequest, noise_names
from mmspeed.pipelines.inference.run_models import load_model, load_other
from mmspeed.pipelines.run.run_folder import RunFolder, sync_file
from mmspeed.protocols import CountsFlops, TextEntry, VideoCodec
from mmspeed.shapes import Strides

log = get_logger("sample")

PNG_MODES = {"1", "I;16", "L", "LA", "P", "RGB", "RGBA"}  # of PIL, which PNG holds as they are
Setting = TypeVar("Setting", int, float)

TOKENS_TOGETHER = 16_384  # of the model, in a batch of videos; more is hardly faster


def encode_prompts(
    prompts: list[str], config: TextConfig, device: Device, pictures: Sequence[np.ndarray | None] | None = None
) -> list[TextEntry]:
    """The text entries of prompts, on the CPU; the encoder is freed afterwards.

    pictures: (H, W, 3), uint8, for an encoder that sees them beside the prompts; None in place of one: black.
    """
    encoder = load_text_encoder(config, device)
    entries = entries_beside(encoder, prompts, pictures)
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
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                return [_entry_of(stored, str(index)) for index in range(len(prompts))]
    entries = encode_prompts(prompts, config, device)
    tensors = {str(i): e.embeds_LD.float().contiguous() for i, e in enumerate(entries)}
    tensors |= {f"{i}.pooled": e.pooled_D.float().contiguous() for i, e in enumerate(entries) if e.pooled_D is not None}
    tensors |= {f"{i}.{name}": t.float().contiguous() for i, e in enumerate(entries) for name, t in e.others.items()}
    with private_file(path) as temporary:
        save_file(tensors, temporary, metadata=wanted)
        sync_file(temporary)
    return entries


def _entry_of(stored: Mapping[str, Tensor], index: str) -> TextEntry:
    """The entry of a prompt's number in the file of stored prompts."""
    others = {name.partition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(f"{index}.")}
    return TextEntry(stored[index], others.pop("pooled", None), others)


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
    own = usual_size(config)
    bucket = Bucket(frames or own.frames, height or own.height, width or own.width)
    try:
        strides.tokens(bucket, model.tokens)
    except ValueError as error:
        raise UserError(f"a video of {bucket} (frames x height x width) cannot be made: {error}") from None
    return bucket


def usual_size(config: Config) -> Bucket:
    """The size of videos for which nothing else is asked: that of `sample` in the config, completed from its first video bucket."""
    size, first = config.sample, next((each for each in config.buckets if not each.is_image), config.buckets[0])
    return Bucket(size.frames or first.frames, size.height or first.height, size.width or first.width)


def sampler_settings(
    config: Config,
    steps: int | None,
    guidance: float | None,
    sampler: str | None,
    seed: int,
    guidance_rescale: float | None = None,
    guidance_2: float | None = None,
) -> SampleSettings:
    """The requested settings, completed from `sample` in the config. Raises UserError for a rescale outside of 0 to 1."""
    rescale = config.sample.guidance_rescale if guidance_rescale is None else guidance_rescale
    if not 0 <= rescale <= 1:
        raise UserError(f"sample.guidance_rescale is {rescale}: use 0 (none) to 1")
    sample = completed(config).sample
    assert sample.steps is not None and sample.guidance is not None
    return SampleSettings(
        steps=steps or sample.steps,
        guidance=sample.guidance if guidance is None else guidance,
        sampler=sampler or sample.sampler,
        seed=seed,
        rescale=rescale,
        guidance_2=sample.guidance_2 if guidance_2 is None else guidance_2,
    )


def clean_prompt(prompt: str) -> str:
    """A prompt from the command line with bytes that are no UTF-8 replaced by characters that a tokenizer accepts."""
    return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def find_checkpoint(folder: RunFolder, which: str | int) -> Path:
    """The checkpoint `latest`, `best`, or of a step. Raises UserError when there is none, with the steps that there are."""
    from mmspeed.loop.checkpoint.manager import best, latest, step_name, steps_in

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


def present_weights(config: RunConfig, weights: Literal["ema", "model"]) -> Literal["ema", "model"]:
    """The wanted weights of a run; the model's own of one without a moving average, which has nothing else."""
    return "model" if config.train.ema_decay is None else weights


def either(own: Setting | None, other: Setting | None, names: str) -> Setting | None:
    """The one of two spellings of a setting that is given. Raises UserError where both are."""
    if own is not None and other is not None:
        raise UserError(f"give {names}, not both: they are one setting")
    return other if own is None else own


def picture_file(picture: str | Path | Image.Image | None, place: Path) -> str | None:
    """The path of a picture; one in memory is written to `place`, so that it is read as every other."""
    if not isinstance(picture, Image.Image):
        return None if picture is None else os.fspath(picture)
    upright = ImageOps.exif_transpose(picture)
    if upright.mode not in PNG_MODES:
        upright = upright.convert("RGB")
        upright.info.pop("icc_profile", None)  # that of the other mode
    upright.save(place, "png")
    return str(place)


@dataclass(frozen=True)
class SamplerChoice:
    """The settings of a call; None: as `sample` in the run's config says."""

    steps: int | None = None
    guidance: float | None = None
    sampler: str | None = None
    rescale: float | None = None
    guidance_2: float | None = None  # of the expert of low noise


class TextToVideo:
    """A text-to-video pipeline with a run's weights.

    pipe = TextToVideo.from_run("runs/my-run")
    pipe("a rabbit in a meadow", seed=1)[0].save("rabbit.mp4")
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        codec: VideoCodec,
        device: Device,
        checkpoint: str | None = None,
        other: OtherExpert | None = None,
        opened: Repository | None = None,
    ) -> None:
        opened = opened_of(config.model) if opened is None else opened
        config = completed(config, opened)
        self.config, self.model, self.codec, self.device = config, model, codec, device
        self.predictor = make_predictor(
            model, config.objective, codec.channels, text_width(config.text), call_of(config.model, opened)
        )
        self.other = other  # of a model with two experts, the one that predicts at other times
        self.checkpoint = checkpoint  # the name of the folder that the weights are from
        self.objective = make_objective(config.objective, family_sampler(config, opened))

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
        folder.check_generator()
        opened = opened_of(config.model)
        config = completed(config, opened)
        if weights not in ("ema", "model"):
            raise UserError(f"weights are 'ema' or 'model', not {weights!r}")
        weights = present_weights(config, weights)
        chosen = pick(device)
        chosen.activate()
        path = find_checkpoint(folder, checkpoint)
        sizes = info["latent_channels"], info["text_width"]
        model = load_model(config, config.model, sizes, path, weights, chosen, opened=opened)
        other = load_other(config, sizes, path, weights, chosen, opened)
        codec = load_codec(config.vae, chosen, folder.codec_weights if config.vae.kind == "linear" else None)
        return cls(config, model, codec, chosen, path.name, other, opened)

    def size(self, frames: int | None = None, height: int | None = None, width: int | None = None) -> Bucket:
        """The size of the videos that a call with these arguments makes. Raises UserError when it cannot be made."""
        return video_shape(self.config, self.codec.strides, self.predictor, frames, height, width)

    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        negative_prompt: str | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        guidance_2: float | None = None,
        guidance_rescale: float | None = None,
        sampler: str | None = None,
        seed: int = 0,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        image: str | Path | Image.Image | None = None,
        last_image: str | Path | Image.Image | None = None,
        video: str | Path | None = None,
        prefix_frames: int | None = None,
        control: str | Path | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[Video]:
        """Sample a video for each prompt. Missing arguments are taken from the run's config.

        image, last_image: the first and last frame, files or PIL's images, for a run with that mode of `conditioning`. video: a file that
        the videos go on from; prefix_frames: so many frames of its end, by default those that the run was trained with. control: a video
        of the same frames, for a run that was trained with one.
        num_inference_steps, guidance_scale: `steps` and `guidance`, as diffusers spells them.

        The same seed, prompt and settings give the same video. Raises UserError for a size that the codec cannot make or the timestep
        shift does not know, for a sampler of the other objective, and for a rescale outside of 0 to 1.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not prompts:
            raise UserError("no prompt was given")
        steps = either(steps, num_inference_steps, "steps or num_inference_steps")
        guidance = either(guidance, guidance_scale, "guidance or guidance_scale")
        settings = SamplerChoice(steps, guidance, sampler, guidance_rescale, guidance_2)
        with tempfile.TemporaryDirectory() as folder:
            first = picture_file(image, Path(folder, "first.png"))
            last = picture_file(last_image, Path(folder, "last.png"))
            before, by = (None if each is None else os.fspath(each) for each in (video, control))
            given = first, last, before, prefix_frames, by
            requests = [
                VideoRequest(prompt, negative_prompt, seed, frames, height, width, *given) for prompt in prompts
            ]
            return [video for _, video in self.sample(requests, settings, on_step, together=1)]

    def sample(
        self,
        requests: Sequence[VideoRequest],
        choice: SamplerChoice = SamplerChoice(),
        on_step: Callable[[int, int], None] | None = None,
        *,
        together: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Iterator[tuple[VideoRequest, Video]]:
        """Yield (request, video) as videos are made: of process `rank` of `world`, its share of the requests, in order.

        Neighbours of one size are sampled in one batch: at most `together`, by default as many as have `TOKENS_TOGETHER` tokens of the
        model; half as many where memory does not suffice. The noise of a video depends on its prompt and seed, and a prompt that
        comes again with one seed gives another video. `on_step(done, total)` counts the steps of this process's videos.
        Raises UserError as a call does, before the first video.
        """
        config = self.config
        prompts = [clean_prompt(request.prompt) for request in requests]
        negatives = [
            config.sample.negative_prompt if each.negative is None else clean_prompt(each.negative) for each in requests
        ]
        seeds = [request.seed or 0 for request in requests]
        names = noise_names(zip(prompts, seeds, strict=True))
        sizes = self.sizes(requests)
        settings = sampler_settings(
            config, choice.steps, choice.guidance, choice.sampler, 0, choice.rescale, choice.guidance_2
        )  # fmt: skip
        objectives = {
            size: self.objective.sized(size, self.predictor.tokens(self.codec.strides.latent(size))) for size in sizes
        }
        self.model.eval()
        mine = list(range(rank, len(requests), world))
        numbered = {index: (requests[index], sizes[index]) for index in mine}
        texts = self._texts({index: prompts[index] for index in mine}, self._seen(numbered))
        negative_texts = self._texts({index: negatives[index] for index in mine}, {})
        images = self._embeddings(numbered)
        most = 1 if clustered_layers(self.model) else together  # clusters of sparse attention are kept for one video
        done = 0
        while mine:
            size = sizes[mine[0]]
            group = self._group(mine, sizes, most)
            count = len(group)
            shape_CThw = (self.codec.channels, *self.codec.strides.latent(size))
            noise_PCThw = torch.stack([rng.normal(shape_CThw, seeds[index], "sample", names[index]) for index in group])

            def tell(step: int, of: int, before: int = done, count: int = count) -> None:
                if on_step is not None:
                    on_step(before + step * count, settings.steps * len(numbered))

            try:
                latents_PCThw = sample_together(
                    self.model,
                    objectives[size],
                    [texts[index] for index in group],
                    [negative_texts[index] for index in group],
                    noise_PCThw,
                    settings,
                    self.device,
                    tell,
                    self.predictor,
                    config.data.fps or RATE,
                    self.codec.strides,
                    other=self.other,
                    conditioning=self._conditioning([(requests[index], images.get(index)) for index in group], size),
                )
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                most = count // 2
                self.device.empty_cache()
                log.warning(f"{count} videos of {size} do not fit into memory at a time: {most} are sampled together")
                continue
            mine, done = mine[count:], done + settings.steps * count
            cut = self.predictor.conditioning.cut
            videos = decode_videos(self.codec, latents_PCThw, config.data.fps or RATE, cut)
            for index, video in zip(group, videos, strict=True):
                yield requests[index], video

    def sizes(self, requests: Sequence[VideoRequest]) -> list[Bucket]:
        """The sizes of the videos of requests. Raises UserError for one that cannot be made."""
        return [self._size_of(request) for request in requests]

    def _size_of(self, request: VideoRequest) -> Bucket:
        """The size of a request's video. Raises UserError, which names its line, for one that cannot be made."""
        try:
            check_request(request, self.config, self.predictor.conditioning)
            return self.size(request.frames, request.height, request.width)
        except UserError as error:
            raise UserError(f"line {request.line}: {error}") if request.line else error from None

    def _seen(self, requests: Mapping[int, tuple[VideoRequest, Bucket]]) -> dict[int, np.ndarray]:
        """The first pictures (H, W, 3), uint8, as they are given, of numbered requests, where the text encoder sees them; else none."""
        if not sees_pictures(self.config.text):
            return {}
        return {index: pictures_of(request, self.config, None)[0] for index, (request, _) in requests.items()}

    def _texts(self, texts: Mapping[int, str], seen: Mapping[int, np.ndarray]) -> dict[int, TextEntry]:
        """The entries of numbered texts, each beside its picture where it has one; the encoder is freed afterwards."""
        names = {index: (text, index if index in seen else None) for index, text in texts.items()}
        wanted = list(dict.fromkeys(names.values()))
        if not wanted:
            return {}
        pictures = [None if index is None else seen[index] for _, index in wanted]
        entries = encode_prompts([text for text, _ in wanted], self.config.text, self.device, pictures)
        by_name = dict(zip(wanted, entries, strict=True))
        return {index: by_name[name] for index, name in names.items()}

    def _embeddings(self, requests: Mapping[int, tuple[VideoRequest, Bucket]]) -> dict[int, Tensor]:
        """The embeddings (K, L, D) of the pictures of numbered requests, of a model that takes them; the encoder is freed afterwards."""
        if self.predictor.conditioning.embedding is None or not requests:
            return {}
        assert isinstance(self.config.model, PublishedModelConfig)  # others take none
        encoder = load_image_encoder(self.config.model, self.device)
        return {
            index: encoder.encode(
                pictures_of(request, self.config, None if self.predictor.conditioning.whole else size)
            )
            for index, (request, size) in requests.items()
        }

    def _conditioning(
        self, requests: Sequence[tuple[VideoRequest, Tensor | None]], size: Bucket
    ) -> ConditioningLatents | None:
        """The frames that requests of one size are given, each with the embeddings of its pictures, where the model takes them."""
        embeddings = [image_KLD for _, image_KLD in requests if image_KLD is not None]
        only = [request for request, _ in requests]
        return conditioning_latents(only, self.config, self.codec, size, self.predictor.conditioning, embeddings)

    def _group(self, queue: list[int], sizes: list[Bucket], most: int | None) -> list[int]:
        """The first requests of the queue that are sampled in one batch."""
        size = sizes[queue[0]]
        if most is None:
            most = max(1, TOKENS_TOGETHER // self.predictor.tokens(self.codec.strides.latent(size)))
        return list(itertools.takewhile(lambda index: sizes[index] == size, queue[:most]))


def decode_videos(codec: VideoCodec, latents_PCThw: torch.Tensor, fps: float, cut: int = 0) -> list[Video]:
    """The video of each latent, without `cut` frames in front."""
    return [from_model_range(codec.decode(latent[None])[0][:, cut:], fps) for latent in latents_PCThw]
