"""Compare the call that training makes of a published transformer with the call of the model's official pipeline.

`official_calls.py` records and compares both calls for the samples that are chosen here.

Legend: B batch, C channels, F H W frames and pixels, T h w latent, L caption tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.config.conditioning import ConditioningConfig, Mode
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.data.loading.collate import (
    choose_text,
    draw_conditioning,
    draw_noise,
    pad_other_texts,
    pad_texts,
    pooled_vectors,
    stacked,
    video_batch,
)
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.codecs.frames import frame_latents
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import family_of
from mmspeed.models.image_encoder import image_embeddings, load_image_encoder
from mmspeed.models.sections import outline, repository_of
from mmspeed.models.text.encoders import entries_beside, load_text_encoder
from mmspeed.pipelines.check.official_calls import (
    Compared,
    compared,
    keep_latents,
    noisy,
    official_calls,
    official_pipeline,
    recorded,
)
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.inference.conditioning_media import control_latents, in_model_range
from mmspeed.pipelines.inference.media import RATE
from mmspeed.protocols import Batch, RunPlace
from mmspeed.shapes import Bucket, as_bucket

# of different lengths; words in quotation marks are drawn as glyphs by some models
PROMPTS = ("a red fox runs over fresh snow in the morning sun", 'a sign that says "rain"')
QUANTILE = 0.37  # of the time, the same for all: a pipeline has one time
OFFICIAL_MODES: tuple[Mode, ...] = ("none", "first", "first_last")  # those that some official pipeline has


# (config, bucket, count) -> the first and the last frame (H, W, 3), uint8, of up to so many clips
FramesOfClips = Callable[[Config, Bucket, int], Sequence[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class OfficialCheck:
    """The comparison of the calls of a bucket, in a mode of `conditioning`.

    name: of the class. batch: where the samples are from, in words.
    """

    name: str
    bucket: Bucket
    arguments: tuple[Compared, ...]
    batch: str
    mode: Mode = "none"

    @property
    def passed(self) -> bool:
        """True where all arguments agree."""
        return all(argument.right for argument in self.arguments)

    def lines(self) -> list[str]:
        """The report."""
        verdict = "is the official pipeline's" if self.passed else "differs from the official pipeline's"
        frames = "" if self.mode == "none" else f", with frames of mode {self.mode},"
        head = f"{self.name}: the call of training at {self.bucket}{frames} {verdict}"
        return [head, f"  {self.batch}", *(f"  {argument.line()}" for argument in self.arguments)]


def check_against_official(
    config: Config,
    prompts: Sequence[str] = PROMPTS,
    captions: Callable[[], Mapping[str, str]] | None = None,
    frames: FramesOfClips | None = None,
) -> list[OfficialCheck]:
    """The comparisons for a config with a published model: one for each mode in which it is given frames.

    captions: those of the config's sources by the keys of their entries. With them, and where the config's cache can be trained on, the
    samples of mode `none` are the first two that training reads from it; otherwise random latents of the first bucket, with the captions
    `prompts`. In the other modes latents are random, and images the first and last `frames` of the config's clips where these can be read,
    otherwise random too. Codec, text encoders and the pipeline's are loaded, one after the other.
    Raises UserError for another model, and where the repository's pipeline is not in diffusers, or none has any of the config's modes.
    """
    if not isinstance(config.model, PublishedModelConfig):
        raise UserError("--against-official compares published models: model.kind is sora")
    repository = repository_of(config.model)
    task = VideoDomain(config, opened=repository)
    modes = [mode for mode in config.conditioning.shares if mode in OFFICIAL_MODES]
    if not modes:
        known = ", ".join(OFFICIAL_MODES)
        raise UserError(f"--against-official: no official pipeline has the modes of `conditioning`; some have {known}")
    if (family := family_of(repository.class_name, repository.key)).control is not None:
        return [_with_control(task, repository, family.control, prompts[:1])]
    return [
        _without_frames(task, repository, prompts, captions)
        if mode == "none"
        else _with_frames(task, repository, mode, prompts, frames)
        for mode in modes
    ]


def _without_frames(
    task: VideoDomain, repository: Repository, prompts: Sequence[str], captions: Callable[[], Mapping[str, str]] | None
) -> OfficialCheck:
    """The comparison for samples that are given no frames."""
    task.conditioning = None
    cached = None if captions is None else cached_batch(task, captions)
    if isinstance(cached, tuple):
        batch, prompts = cached
        words = f"{batch.size} samples of the cache {task.config.cache_root}"
    else:
        task.open_without_data()
        batch = training_batch(task, as_bucket(task.config.buckets[0]), prompts)
        words = "random latents" if cached is None else f"random latents, because {cached}"
    return _compared(task, repository, batch, prompts, words)


def _with_control(task: VideoDomain, repository: Repository, argument: str, prompts: Sequence[str]) -> OfficialCheck:
    """The comparison of a model with a control, which its pipeline takes as an `argument`, of one video at a time."""
    task.open_without_data()
    bucket, rule = as_bucket(task.config.buckets[0]), task.predictor.conditioning
    control = [picture for picture, _ in pictures(bucket, bucket.frames)]
    codec = load_codec(task.config.vae, Device("cpu", 0), task.config.codec_weights)
    latents = control_latents(codec, rule, np.stack([np.array(picture) for picture in control]))
    batch = training_batch(task, bucket, prompts)
    batch = replace(batch, tensors={**batch.tensors, **{name: latent[None] for name, latent in latents.items()}})
    return _compared(task, repository, batch, prompts, "random latents and control", settings={argument: control})


def _with_frames(
    task: VideoDomain, repository: Repository, mode: Mode, prompts: Sequence[str], frames: FramesOfClips | None
) -> OfficialCheck:
    """The comparison in a mode that gives frames."""
    task.open_without_data()
    bucket, family = as_bucket(task.config.buckets[0]), family_of(repository.class_name, repository.key)
    images, words = pictures_of_clips(task.config, bucket, 1 if family.one_image else len(prompts), frames)
    latents = random_latents(task, bucket, len(prompts))
    seen = [np.array(first) for _, (first, _) in zip(prompts, itertools.cycle(images), strict=False)]
    batch = training_batch(task, bucket, prompts, encoded_frames(task, bucket, latents, mode, images), seen)
    settings, name = (
        image_settings(images, mode, family.one_image),
        family.from_images or "that makes videos from images",
    )
    return _compared(task, repository, batch, prompts, words, mode, name, settings)


def _compared(
    task: VideoDomain,
    repository: Repository,
    batch: Batch,
    prompts: Sequence[str],
    words: str,
    mode: Mode = "none",
    name: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> OfficialCheck:
    """The comparison of the calls of a batch. name: of the pipeline; None: the repository's own. settings: of its call."""
    model = outline(task.config.model, task.sizes.channels, task.sizes.text_width, repository)
    batches = batch, without_encodings(batch)
    ours, marked = (recorded(model, partial(values_of, task, {"model": model}, each)) for each in batches)
    pipeline = official_pipeline(repository, model, name or repository.index.get("_class_name", ""))
    if mode != "none" and task.predictor.conditioning.blend:
        keep_latents(pipeline, noisy(task, batch))
    official = official_calls(pipeline, model, task, batch, prompts, settings)
    return OfficialCheck(repository.class_name, as_bucket(batch.shape), compared(ours, official, marked), words, mode)


def cached_batch(task: VideoDomain, captions: Callable[[], Mapping[str, str]]) -> tuple[Batch, list[str]] | str:
    """(the first two samples that training reads from the task's cache, with different captions where there are some; their captions).

    Of no cache that can be trained on: the reason.
    """
    place = RunPlace(Device("cpu", 0))
    try:
        task.open(place)
    except UserError as error:
        return str(error)
    data, dropout = task.data(place), task.config.train.caption_dropout
    uses = [use for use in data.sampler.draws(0) if not use.lost]
    keys = {
        use.name: choose_text(use.sample, task.config.seed, use.name, dropout) or task.cache.null_key for use in uses
    }
    first, *others = [use for use in uses if use.sample.bucket == uses[0].sample.bucket]
    others.sort(key=lambda use: keys[use.name] == keys[first.name])
    pair, words = [first, *others[:1]], captions()
    unknown = next((use.sample.source for use in pair if keys[use.name] not in words), None)
    if unknown is not None:
        raise UserError(f"{unknown}: its caption in the cache is not that of the sources: run mmspeed preprocess again")
    return data.loader.collate([(use, 1.0) for use in pair]), [words[keys[use.name]] for use in pair]


def pictures_of_clips(
    config: Config, bucket: Bucket, count: int, frames: FramesOfClips | None
) -> tuple[list[tuple[Image.Image, Image.Image]], str]:
    """(a first and a last picture for each of `count` videos, where they are from in words): random where clips cannot be read."""
    if frames is None:
        return pictures(bucket, count), "random latents and images"
    try:
        clips = frames(config, bucket, count)
    except UserError as error:
        return pictures(bucket, count), f"random latents and images, because {error}"
    if not clips:
        return pictures(bucket, count), f"random latents and images, because no clip of {bucket} can be read"
    images = [(Image.fromarray(first), Image.fromarray(last)) for first, last in clips]
    return list(itertools.islice(itertools.cycle(images), count)), "random latents, and frames of the config's clips"


def pictures(bucket: Bucket, count: int) -> list[tuple[Image.Image, Image.Image]]:
    """Pictures of random pixels of a bucket's size: a first and a last one for each of `count` videos."""
    size = 2, bucket.height, bucket.width, 3
    pixels = [
        (64 * rng.normal(size, 0, "official", "pixels", i) + 128).clamp(0, 255).byte().numpy() for i in range(count)
    ]
    return [(Image.fromarray(first), Image.fromarray(last)) for first, last in pixels]


def image_settings(images: Sequence[tuple[Image.Image, Image.Image]], mode: Mode, one: bool) -> dict[str, Any]:
    """The arguments of a pipeline that hold images."""
    if not images:
        return {}
    first, last = ([pair[place] for pair in images] for place in (0, 1))
    arguments: dict[str, Any] = {"image": first[0] if one else first}
    return arguments | ({"last_image": last[0] if one else last} if mode == "first_last" else {})


def random_latents(task: VideoDomain, bucket: Bucket, count: int) -> list[Tensor]:
    """Random latents (C, T, h, w) of `count` samples."""
    shape_CThw = (task.sizes.channels, *task.latent(bucket))
    return [rng.normal(shape_CThw, 0, "official", i) for i in range(count)]


def training_batch(
    task: VideoDomain,
    bucket: Bucket,
    prompts: Sequence[str],
    frames: Sequence[Mapping[str, Tensor]] = (),
    seen: Sequence[np.ndarray] | None = None,
) -> Batch:
    """A batch as the loader makes it, of random latents with these captions, all at one time.

    frames: those that samples are given. seen: pictures (H, W, 3) beside the captions, for a text encoder that sees them.
    """
    entries = entries_beside(load_text_encoder(task.config.text, Device("cpu", 0)), list(prompts), seen)
    text_BLD, mask_BL = pad_texts(entries)
    given = stacked(frames or [{"latents": latent} for latent in random_latents(task, bucket, len(prompts))])
    latents_BCThw, names = given.pop("latents"), [("check", 0, i) for i in range(len(prompts))]
    return video_batch(
        latents_BCThw=latents_BCThw,
        text_BLD=text_BLD,
        text_mask_BL=mask_BL,
        weights_B=torch.ones(len(prompts)),
        names=names,
        bucket=bucket,
        sources=["check"] * len(prompts),
        pooled_BD=pooled_vectors(entries),
        noise_BCThw=draw_noise(names, tuple(latents_BCThw.shape[1:]), 0),
        u_B=torch.full((len(prompts),), QUANTILE, dtype=torch.float64),
        fps_B=torch.full((len(prompts),), task.config.data.fps or RATE) if task.predictor.timed else None,
        others=given | pad_other_texts(entries),
    )


def without_encodings(batch: Batch) -> Batch:
    """The batch with NaN for what the codec made of conditioning frames, or of a control."""
    tensors = dict(batch.tensors)
    if encoded := [name for name in tensors if name == "condition" or name.endswith(".latents")]:
        tensors |= {name: torch.full_like(tensors[name], torch.nan) for name in encoded}
    elif "conditioning_mask" in tensors:
        tensors["latents"] = tensors["latents"].masked_fill(
            tensors["conditioning_mask"][:, None, :, None, None], torch.nan
        )
    return replace(batch, tensors=tensors)


def encoded_frames(
    task: VideoDomain,
    bucket: Bucket,
    latents: Sequence[Tensor],
    mode: Mode,
    images: Sequence[tuple[Image.Image, Image.Image]],
) -> list[dict[str, Tensor]]:
    """The frames that videos with these latents are given, encoded as `mmspeed preprocess` does; a draw of the codec is its mean."""
    rule, codec = task.predictor.conditioning, load_codec(task.config.vae, Device("cpu", 0), task.config.codec_weights)
    frames, encoder = [], None
    for latent_CThw, (first, last) in zip(latents, itertools.cycle(images), strict=False):
        video_1CFHW = torch.zeros(1, 3, bucket.frames, bucket.height, bucket.width)
        for place, picture in ((0, first), (-1, last)):
            video_1CFHW[:, :, place] = in_model_range(np.array(picture)[None])[:, :, 0]
        names = [name for name in rule.stored([mode]) if not name.endswith("_logvar")]
        stored = {name: each[0] for name, each in frame_latents(video_1CFHW, names, codec.encode).items()}
        if rule.embedding is not None and encoder is None:
            assert isinstance(task.config.model, PublishedModelConfig)  # as the check has seen
            encoder = load_image_encoder(task.config.model, Device("cpu", 0))
        if encoder is not None:
            clip_FHW3 = np.stack([np.array(first), np.array(last)])
            stored |= {name: each[0] for name, each in image_embeddings(encoder, names, [clip_FHW3]).items()}
        # a causal codec: the first latent frame is that of the first frame alone
        if rule.how == "replace" and not names:
            stored |= {name: each[0] for name, each in frame_latents(video_1CFHW, ["first"], codec.encode).items()}
        only = ConditioningConfig.model_validate({mode: 1.0})
        frames.append(
            draw_conditioning(latent_CThw, stored, only, rule, task.sizes.strides, 0, ("check", 0, 0), "check")
        )
    return frames
