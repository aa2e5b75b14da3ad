"""Compare the call that training makes of a published transformer with the call of the model's official pipeline.

Both calls are recorded and go no further, so the transformer is an outline without weights. The official pipeline gets the same noisy
latents, in whatever shape it draws its noise, the same time, captions and images; it encodes these itself.

Legend: B batch, C channels, F H W frames and pixels, T h w latent, L caption tokens.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.config.conditioning import ConditioningConfig, Mode
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.data.loading.collate import (
    AnchorFrames,
    choose_text,
    draw_noise,
    give_frames,
    pad_other_texts,
    pad_texts,
    pooled_vectors,
    video_batch,
)
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.build import outline, repository_of
from mmspeed.models.codecs.frames import frame_latents
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import family_of
from mmspeed.models.image_encoder import image_embeddings, load_image_encoder
from mmspeed.models.text.encoders import entries_beside, load_text_encoder
from mmspeed.models.weights import quiet
from mmspeed.pipelines.inference.anchor_media import in_model_range
from mmspeed.pipelines.inference.media import RATE
from mmspeed.pipelines.tasks.video import VideoTask
from mmspeed.protocols import Batch, RunPlace
from mmspeed.rng import Seed
from mmspeed.shapes import Bucket, as_bucket

# of different lengths; words in quotation marks are drawn as glyphs by some models
PROMPTS = ("a red fox runs over fresh snow in the morning sun", 'a sign that says "rain"')
QUANTILE = 0.37  # of the time, the same for all: a pipeline has one time
# the largest difference of captions, of their largest number: encoders sum in another order in another batch
ENCODED = 1e-6
OFFICIAL_MODES: tuple[Mode, ...] = ("none", "first", "first_last")  # those that some official pipeline has
Arguments = Mapping[str, Any]
# arguments that change nothing in training, and those that stand for an absent one
SILENT = ("return_dict", "attention_kwargs", "joint_attention_kwargs")


@dataclass(frozen=True)
class Compared:
    """One argument of both calls.

    Args:
        name: of the forward's argument.
        ours, official: the kind of value, in words.
        error: the largest difference of the numbers that count; None where the two cannot be compared.
        allowed: the largest that is right.
    """

    name: str
    ours: str
    official: str
    error: float | None
    allowed: float

    @property
    def right(self) -> bool:
        """True where both calls agree."""
        return self.error is not None and self.error <= self.allowed

    def line(self) -> str:
        """A line of the report."""
        verdict = (
            "cannot be compared" if self.error is None else f"differ by {self.error:.3g}" if self.error else "equal"
        )
        return f"{'' if self.right else 'WRONG: '}{self.name}: ours {self.ours}, official {self.official}: {verdict}"


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
    config: Config, prompts: Sequence[str] = PROMPTS, captions: Callable[[], Mapping[str, str]] | None = None
) -> list[OfficialCheck]:
    """The comparisons for a config with a published model: one for each mode in which it is given frames.

    captions: those of the config's sources by the keys of their entries. With them, and where the config's cache can be trained on, the
    samples of mode `none` are the first two that training reads from it; otherwise random latents of the first bucket, with the captions
    `prompts`. In the other modes latents and images are random. Codec, text encoders and the pipeline's are loaded, one after the other.
    Raises UserError for another model, and where the repository's pipeline is not in diffusers, or none has any of the config's modes.
    """
    if not isinstance(config.model, PublishedModelConfig):
        raise UserError("--against-official compares published models: model.kind is sora")
    repository = repository_of(config.model)
    task = VideoTask(config, opened=repository)
    modes = [mode for mode in config.conditioning.shares if mode in OFFICIAL_MODES]
    if not modes:
        known = ", ".join(OFFICIAL_MODES)
        raise UserError(f"--against-official: no official pipeline has the modes of `conditioning`; some have {known}")
    return [
        _without_frames(task, repository, prompts, captions)
        if mode == "none"
        else _with_frames(task, repository, mode, prompts)
        for mode in modes
    ]


def _without_frames(
    task: VideoTask, repository: Repository, prompts: Sequence[str], captions: Callable[[], Mapping[str, str]] | None
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
    model = outline(task.config.model, task.inputs.channels, task.inputs.text_width, repository)
    ours = recorded(model, lambda: task.loss({"model": model}, batch))
    pipeline = official_pipeline(repository, model, repository.index.get("_class_name", ""))
    official = official_calls(pipeline, model, task, batch, prompts)
    return OfficialCheck(repository.class_name, as_bucket(batch.shape), compared(ours, official), words)


def _with_frames(task: VideoTask, repository: Repository, mode: Mode, prompts: Sequence[str]) -> OfficialCheck:
    """The comparison in a mode that gives frames, of random images."""
    task.open_without_data()
    bucket, family = as_bucket(task.config.buckets[0]), family_of(repository.class_name, repository.key)
    images = pictures(bucket, 1 if family.one_image else len(prompts))
    latents = random_latents(task, bucket, len(prompts))
    seen = [np.array(first) for _, (first, _) in zip(prompts, itertools.cycle(images), strict=False)]
    batch = training_batch(task, bucket, prompts, encoded_frames(task, bucket, latents, mode, images), seen)
    model = outline(task.config.model, task.inputs.channels, task.inputs.text_width, repository)
    models = {"model": model}
    ours, marked = (recorded(model, partial(task.loss, models, each)) for each in (batch, without_encodings(batch)))
    pipeline = official_pipeline(repository, model, family.from_images or "that makes videos from images")
    if task.predictor.anchors.blend:
        _keep_latents(pipeline, noisy(task, batch))
    official = official_calls(pipeline, model, task, batch, prompts, image_settings(images, mode, family.one_image))
    return OfficialCheck(
        repository.class_name, bucket, compared(ours, official, marked), "random latents and images", mode
    )


def cached_batch(task: VideoTask, captions: Callable[[], Mapping[str, str]]) -> tuple[Batch, list[str]] | str:
    """(the first two samples that training reads from the task's cache, with different captions where there are some; their captions).

    Of no cache that can be trained on: the reason.
    """
    place = RunPlace(Device("cpu", 0))
    try:
        task.open(place)
    except UserError as error:
        return str(error)
    data, dropout = task.data(place), task.config.train.caption_dropout
    seed = Seed(task.config.seed, place.generator)
    uses = [use for use in data.sampler.draws(0) if not use.lost]
    keys = {use.name: choose_text(use.sample, seed, use.name, dropout) or task.cache.null_key for use in uses}
    first, *others = [use for use in uses if use.sample.bucket == uses[0].sample.bucket]
    others.sort(key=lambda use: keys[use.name] == keys[first.name])
    pair, words = [first, *others[:1]], captions()
    unknown = next((use.sample.source for use in pair if keys[use.name] not in words), None)
    if unknown is not None:
        raise UserError(f"{unknown}: its caption in the cache is not that of the sources: run mmspeed preprocess again")
    return data.loader.collate([(use, 1.0) for use in pair]), [words[keys[use.name]] for use in pair]


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


def random_latents(task: VideoTask, bucket: Bucket, count: int) -> list[Tensor]:
    """Random latents (C, T, h, w) of `count` samples."""
    shape_CThw = (task.inputs.channels, *task.latent(bucket))
    return [rng.normal(shape_CThw, 0, "official", i) for i in range(count)]


def training_batch(
    task: VideoTask,
    bucket: Bucket,
    prompts: Sequence[str],
    frames: Sequence[AnchorFrames] = (),
    seen: Sequence[np.ndarray] | None = None,
) -> Batch:
    """A batch as the loader makes it, of random latents with these captions, all at one time.

    frames: those that samples are given. seen: pictures (H, W, 3) beside the captions, for a text encoder that sees them.
    """
    entries = entries_beside(load_text_encoder(task.config.text, Device("cpu", 0)), list(prompts), seen)
    text_BLD, mask_BL = pad_texts(entries)
    latents = [each.latent_CThw for each in frames] or random_latents(task, bucket, len(prompts))
    names, shape_CThw = [("check", 0, i) for i in range(len(prompts))], tuple(latents[0].shape)
    conditions = [each.condition_CThw for each in frames if each.condition_CThw is not None]
    embeddings = [each.image_KLD for each in frames if each.image_KLD is not None]
    return video_batch(
        latents_BCThw=torch.stack(latents),
        text_BLD=text_BLD,
        text_mask_BL=mask_BL,
        weights_B=torch.ones(len(prompts)),
        names=names,
        bucket=bucket,
        sources=["check"] * len(prompts),
        pooled_BD=pooled_vectors(entries),
        noise_BCThw=draw_noise(names, shape_CThw, 0),
        u_B=torch.full((len(prompts),), QUANTILE, dtype=torch.float64),
        fps_B=torch.full((len(prompts),), task.config.data.fps or RATE) if task.predictor.timed else None,
        anchor_BT=torch.stack([each.anchor_T for each in frames]) if frames else None,
        condition_BCThw=torch.stack(conditions) if conditions else None,
        image_BKLD=torch.stack(embeddings) if embeddings else None,
        others=pad_other_texts(entries),
    )


def without_encodings(batch: Batch) -> Batch:
    """The batch with NaN for what the codec made of given frames."""
    tensors = dict(batch.tensors)
    if "condition" in tensors:
        tensors["condition"] = torch.full_like(tensors["condition"], torch.nan)
    else:
        tensors["latents"] = tensors["latents"].masked_fill(tensors["given"][:, None, :, None, None], torch.nan)
    return replace(batch, tensors=tensors)


def encoded_frames(
    task: VideoTask,
    bucket: Bucket,
    latents: Sequence[Tensor],
    mode: Mode,
    images: Sequence[tuple[Image.Image, Image.Image]],
) -> list[AnchorFrames]:
    """The frames that videos with these latents are given, encoded as `mmspeed preprocess` does; a draw of the codec is its mean."""
    rule, codec = task.predictor.anchors, load_codec(task.config.vae, Device("cpu", 0), task.config.codec_weights)
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
        frames.append(give_frames(latent_CThw, stored, only, rule, task.inputs.strides, 0, ("check", 0, 0), "check"))
    return frames


def time_of(task: VideoTask, batch: Batch) -> Tensor:
    """The model times (B,) of a batch."""
    bucket, latent = as_bucket(batch.shape), batch["latents"].shape[2:]
    objective = task.objective.sized(bucket, task.predictor.tokens((latent[0], latent[1], latent[2])))
    return objective.time_from_quantile(batch["quantiles"]).float()


def noisy(task: VideoTask, batch: Batch) -> Tensor:
    """The noisy latents (B, C, T, h, w) of a batch."""
    return task.objective.training_pair(batch["latents"], batch["noise"], time_of(task, batch))[0]


class _RecordedError(Exception):
    """Ends a call whose arguments are known."""


def recorded(model: nn.Module, run: Callable[[], object]) -> Arguments:
    """The arguments, by name, with which `run` first calls a model, which is not computed."""
    calls: list[Arguments] = []
    names = inspect.signature(type(model).forward)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(
            {key: each for key, each in names.bind(module, *args, **kwargs).arguments.items() if key != "self"}
        )
        raise _RecordedError

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        run()
    except _RecordedError:
        pass
    finally:
        handle.remove()
    if not calls:
        raise UserError(f"{type(model).__name__} was not called")
    return calls[0]


def official_pipeline(repository: Repository, model: nn.Module, name: str) -> Any:
    """The pipeline of a name around a repository's transformer, on the CPU. Raises UserError for a pipeline that diffusers lacks."""
    kind = repository.pipeline_class(name)
    own = repository.index.get(repository.transformer)
    places = [part for part, place in repository.index.items() if place == own]  # also a second expert
    with quiet():
        pipeline = kind.from_pretrained(repository.folder, **dict.fromkeys(places, model), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.__class__ = type(name, (kind,), {"_execution_device": torch.device("cpu")})
    return pipeline


def _keep_latents(pipeline: Any, x_BCThw: Tensor) -> None:
    """Let a pipeline whose first latents are not noise alone begin with these."""
    own = pipeline.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        return (x_BCThw.clone(), *own(*args, **kwargs)[1:])

    pipeline.prepare_latents = prepare_latents


def official_calls(
    pipeline: Any,
    model: nn.Module,
    task: VideoTask,
    batch: Batch,
    prompts: Sequence[str],
    images: Mapping[str, Any] = MappingProxyType({}),
) -> Arguments:
    """The arguments with which a pipeline calls its transformer for the samples of a batch; `images`: its own that hold images.

    A pipeline has one time and one frame rate for all of its samples: it is called for each of the batch's, and its sample is taken.
    """
    x_BCThw, bucket, times_B = noisy(task, batch), as_bucket(batch.shape), time_of(task, batch).tolist()
    rates_B = batch["fps"].tolist() if "fps" in batch else [task.config.data.fps or RATE] * batch.size
    calls: dict[tuple[float, float], Arguments] = {}
    for t, fps in zip(times_B, rates_B, strict=True):
        if (t, fps) not in calls:
            calls[t, fps] = official_call(pipeline, model, x_BCThw, t, prompts, bucket, {"frame_rate": fps, **images})
    return of_samples([calls[each] for each in zip(times_B, rates_B, strict=True)])


def of_samples(calls: Sequence[Arguments]) -> Arguments:
    """One call from a call for each sample: of tensors with a row a sample, row b of call b; of the others those of the first."""

    def row_of_each(name: str) -> Any:
        values = [call.get(name) for call in calls]
        tensors = [each for each in values if isinstance(each, Tensor) and each.ndim and len(each) == len(calls)]
        if len(tensors) < len(calls):
            return values[0]
        return torch.stack([each[place] for place, each in enumerate(tensors)])

    return {name: row_of_each(name) for name in calls[0]}


@torch.no_grad()
def official_call(
    pipeline: Any,
    model: nn.Module,
    x_BCThw: Tensor,
    t: float,
    prompts: Sequence[str],
    bucket: Bucket,
    further: Mapping[str, Any],
) -> Arguments:
    """The arguments with which a pipeline calls its transformer for these noisy latents, at model time `t`.

    further: arguments of the pipeline, of which it gets those that it takes.
    """
    takes, guided = inspect.signature(pipeline.__call__).parameters, _config(model).get("guidance_embeds", False)
    settings: dict[str, Any] = {
        "height": bucket.height,
        "width": bucket.width,
        "num_frames": bucket.frames,
        "num_inference_steps": 2,
        "output_type": "latent",
        **further,
        **({} if guided else {"guidance_scale": 1.0}),  # without a second prediction
    }
    _set_time(pipeline.scheduler, t)
    processor = getattr(pipeline, "video_processor", None)
    # a size that the pipeline would choose by the picture's
    if processor is not None and hasattr(processor, "calculate_default_height_width"):
        processor.calculate_default_height_width = lambda *_, **__: (bucket.height, bucket.width)
    keys = {key: each for key, each in settings.items() if key in takes}

    def run() -> None:
        with _DrawsThese(x_BCThw):
            pipeline(prompt=list(prompts), **keys)

    return recorded(model, run)


def _set_time(scheduler: Any, t: float) -> None:
    """Let a scheduler have one step, at model time `t`, in its own units."""
    steps = scheduler.config.num_train_timesteps
    if scheduler.config.get("prediction_type") == "v_prediction":
        time = torch.tensor([round(t * (steps - 1))])
    else:
        sigma = torch.tensor([t], dtype=torch.float32)
        time = (1.0 - sigma if scheduler.config.get("invert_sigmas") else sigma) * steps

    def set_timesteps(
        num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, timesteps: Any = None, mu: Any = None
    ) -> None:
        scheduler.timesteps, scheduler.num_inference_steps = time, 1
        scheduler.sigmas = torch.tensor([t, 0.0])

    scheduler.set_timesteps = set_timesteps


class _DrawsThese(TorchFunctionMode):
    """A mode in which noise of the latent's size is the latent (B, C, T, h, w), with its dims in the order that is asked for.

    Other noise, such as of a draw from the codec's posterior, is 0.
    """

    def __init__(self, x_BCThw: Tensor) -> None:
        super().__init__()
        self.x_BCThw = x_BCThw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            size = tuple(args[0]) if args and isinstance(args[0], Sequence) else tuple(args)
            x_BCThw = self.x_BCThw
            for each in (x_BCThw, x_BCThw.transpose(1, 2), x_BCThw[:, :, 0]):
                if tuple(each.shape) == size and each.numel() == x_BCThw.numel():
                    return each.clone()
            return func(*args, **(kwargs or {})).zero_()
        return func(*args, **(kwargs or {}))


def compared(ours: Arguments, official: Arguments, marked: Arguments | None = None) -> tuple[Compared, ...]:
    """The arguments of two calls of one class. Rows of captions that a mask leaves out do not count.

    marked: our call with NaN for what the codec gave; those numbers are compared apart from the others, as encodings.
    """
    names = [name for name in dict.fromkeys((*ours, *official)) if name not in SILENT]
    pairs = []
    for name in names:
        one, other, codec = ours.get(name), official.get(name), None if marked is None else marked.get(name)
        if one is None and other is None:
            continue
        if isinstance(codec, Tensor) and codec.is_floating_point() and bool(codec.isnan().any()):
            pairs += _parts(name, one, other, codec.isnan())
            continue
        allowed = (
            ENCODED
            if name.startswith(("encoder_hidden_states", "pooled", "image_embeds")) and "mask" not in name
            else 0.0
        )
        if allowed and isinstance(other, Tensor):
            allowed *= max(1.0, float(other.abs().max()))
        pairs.append(Compared(name, _words(one), _words(other), _difference(name, one, other, ours, official), allowed))
    return tuple(pairs)


def _parts(name: str, one: Any, other: Any, encoded: Tensor) -> list[Compared]:
    """The comparison of a tensor's own numbers, and that of those which the codec gave (`encoded`)."""
    if not isinstance(other, Tensor) or other.shape != one.shape:
        return [Compared(name, _words(one), _words(other), None, 0.0)]
    allowed = ENCODED * max(1.0, float(other[encoded].abs().max()))
    rest, kept = _distance(one[~encoded], other[~encoded]), _distance(one[encoded], other[encoded])
    return [
        Compared(name, _words(one), _words(other), rest, 0.0),
        Compared(f"{name} (encoded frames)", _words(one), _words(other), kept, allowed),
    ]


def _difference(name: str, one: Any, other: Any, ours: Arguments, official: Arguments) -> float | None:
    """The largest difference of two arguments; None for those of other kinds or shapes."""
    if "mask" in name:
        return _of_masks(one, other)
    mask = _mask_of(name, ours)
    if mask is not None and isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim == 3:
        if other.shape[1] < one.shape[1] or one.shape[2] != other.shape[2] or len(one) != len(other):
            return None
        one, other = one[mask], other[:, : one.shape[1]][mask]
    return _distance(one, other)


def _distance(one: Any, other: Any) -> float | None:
    """The largest difference of two values: tensors of one shape and kind, numbers, or sequences of them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, Sequence) and isinstance(other, Sequence) and len(one) == len(other):
        each = [_distance(*pair) for pair in zip(one, other, strict=True)]
        return None if None in each else max((error for error in each if error is not None), default=0.0)
    # one for each sample, where the pipeline has one for all
    if isinstance(one, Tensor) and isinstance(other, int | float):
        return float((one.double() - torch.tensor(other, dtype=one.dtype).double()).abs().max())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return None


def _of_masks(one: Any, other: Any) -> float | None:
    """0 for masks (B, L) that show the same tokens; an absent one shows all, and what lies beyond the shorter one must be hidden."""
    masks = [mask.bool() for mask in (one, other) if isinstance(mask, Tensor)]
    if len(masks) == 1:
        return float((~masks[0]).any())
    if len(masks) != 2 or len(masks[0]) != len(masks[1]):
        return None
    length = min(mask.shape[1] for mask in masks)
    same = torch.equal(masks[0][:, :length], masks[1][:, :length])
    return float(not same or any(bool(mask[:, length:].any()) for mask in masks))


def _mask_of(name: str, arguments: Arguments) -> Tensor | None:
    """The mask of a caption among the arguments of its call; None where it has none."""
    second = name.endswith("_2")
    for key, each in arguments.items():
        if (
            "mask" in key
            and key.endswith("_2") == second
            and isinstance(each, Tensor)
            and name.startswith("encoder_hidden")
        ):
            return each.bool()
    return None


def _words(value: Any) -> str:
    """A value in words: a tensor by its number type and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Sequence) and any(isinstance(each, Tensor) for each in value):
        return f"[{', '.join(map(_words, value))}]"
    return "none" if value is None else repr(value)


def _config(model: nn.Module) -> Any:
    return model.config
