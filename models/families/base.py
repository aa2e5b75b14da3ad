"""Families of published video transformers: what the pipeline of a class does around its transformer, as data and pure functions.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, D text width, E model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmspeed.config.known_models import Published
from mmspeed.errors import UserError
from mmspeed.models.text.recipes import TextRecipe
from mmspeed.protocols.calls import Conditions, ModelCall, Predicted
from mmspeed.shapes import OtherSizeError

if TYPE_CHECKING:
    from mmspeed.config import Config as RunConfig
    from mmspeed.plan.traffic import AttentionWorkload
    from mmspeed.shapes import Bucket

Config = Mapping[str, Any]  # the arguments that a class was made with
Index = Mapping[str, Any]  # the contents of a repository's model_index.json
Parts = Callable[[str], Config]  # (folder of a repository) -> its settings, such as those of the codec
Latent = tuple[int, int, int]
TIMES = 1000.0  # units of these models' time, from 0 to 1 of ours
UNLIMITED = 1 << 30  # latent positions
MOST_BLOCKS = 2  # of each list, in a small model
WIDTH_OF_TIMES = 16
LAST = "-1"  # in a pattern of `unused`: the last block of a list
OWN_CALL = "mmspeed_call"  # in model_index.json: fields of the call of a small model


@dataclass(frozen=True)
class SizeLimits:
    """The latents (T, h, w) that a class takes beyond multiples of its patch: at least and at most so many positions along each dim."""

    least: Latent = (1, 1, 1)
    most: Latent = (UNLIMITED, UNLIMITED, UNLIMITED)

    def check(self, latent: Latent) -> None:
        """Raises OtherSizeError for a latent outside of the limits."""
        t, h, w = (min(max(size, low), high) for size, low, high in zip(latent, self.least, self.most, strict=True))
        if (t, h, w) == latent:
            return
        rows = zip(("frames", "height", "width"), self.least, self.most, strict=True)
        words = [
            f"{label} {low}" if low == high else f"{label} up to {high}"
            for label, low, high in rows
            if high < UNLIMITED
        ]
        raise OtherSizeError(f"latent {latent}: the model takes {', '.join(words)} alone", (t, h, w))


@dataclass(frozen=True, kw_only=True)
class FamilyCall(ABC):
    """The parts of a `ModelCall` that are alike in most families; one has its own `patch`, `check`, `call` and `flops`.

    Here: it predicts a velocity, takes neither frames per second nor a pooled vector, and returns the prediction as it is.
    """

    predicts: Predicted = "velocity"
    timed: bool = False

    @staticmethod
    @abstractmethod
    def patch(config: Config) -> Latent:
        """The latent positions of a token along time, height and width."""

    def pooled_width(self, config: Config) -> int:
        return 0

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return first_output(output)

    def limits(self, config: Config) -> SizeLimits:
        """The latents that the class takes, such as those of the positions that it has learnt: here all."""
        return SizeLimits()

    def tokens(self, config: Config, latent: Latent) -> int:
        """Tokens of the sample, without those of captions, which may attend together with them.

        Raises ValueError for a latent that the class does not take.
        """
        tokens = math.prod(token_grid(latent, self.patch(config)))
        self.limits(config).check(latent)
        return tokens


@runtime_checkable
class DescribesAttention(Protocol):
    """A call that knows of the blocks' attention what `check` and the start of a run say."""

    def sparse_notes(
        self, config: Config, latents: Mapping[Bucket, Latent], run: RunConfig
    ) -> tuple[list[str], list[str]]:
        """Lines and warnings about sparse blocks, for latents of these buckets."""
        ...

    def attention_workload(self, config: Config, latent: Latent, text_tokens: int, size: int) -> AttentionWorkload:
        """The sizes of a step of one sample, for the traffic of split sequences. size: bytes of a number in the computation."""
        ...


@dataclass(frozen=True)
class SmallSizes:
    """Sizes of a small model and of its inputs.

    Args:
        channels: of latents.
        text_width, text_tokens: of captions.
        latent: (T, h, w) of a video, for classes with positions of their own size.
        hidden: (a layer's size, the least) -> a small size that divides over processes as that one does.
    """

    channels: int
    text_width: int
    text_tokens: int
    latent: Latent
    hidden: Callable[[int, int], int]


@dataclass(frozen=True)
class SmallClass:
    """Rules for small models of a class.

    Args:
        patch: (arguments of the class) -> its patch along time, height and width.
        head: channels of an attention head.
        own: (arguments, sizes, width of the small model) -> the arguments that differ.
        call: (call, tokens of the longest caption) -> the call of a small model.
    """

    patch: Callable[[Config], Latent]
    head: int
    own: Callable[[Config, SmallSizes, int], dict[str, Any]]
    call: Callable[[ModelCall, int], ModelCall] = lambda call, text_tokens: call

    def config(self, config: Config, sizes: SmallSizes) -> dict[str, Any]:
        """The small model's arguments, from those of a large one."""
        width = self.head * config["num_attention_heads"]
        known = {name: _plain(value) for name, value in config.items()}
        lists = [name for name in ("num_layers", "num_single_layers", "num_refiner_layers") if name in known]
        blocks: dict[str, Any] = {name: min(known[name], MOST_BLOCKS) for name in lists}
        return {**known, "attention_head_dim": self.head, **blocks, **self.own(config, sizes, width)}


def even_sigmas(steps: int) -> list[float]:
    """Noise levels 1, ..., 1 / steps, evenly spaced."""
    return [float(sigma) for sigma in np.linspace(1.0, 1 / steps, steps)]


def sigmas_to_zero(steps: int) -> list[float]:
    """Noise levels from 1 towards 0, evenly spaced, without the 0 itself."""
    return [float(sigma) for sigma in np.linspace(1.0, 0.0, steps + 1)[:-1]]


def per_thousand(timestep: float) -> float:
    """The model time of a timestep from 0 to 1000."""
    return timestep / TIMES


@dataclass(frozen=True)
class Sampling:
    """The settings of the official pipeline around its scheduler.

    Args:
        steps, guidance: the pipeline's own.
        sigmas: (steps) -> the noise levels that it hands to the scheduler; None: the scheduler makes them.
        time: (timestep of the scheduler) -> model time.
        sign: factor from the prediction to what the scheduler takes.
        pack, unpack: the latent (B, C, T, h, w) as the pipeline holds it, and back to the shape of another one.
        renormed: True where a guided prediction gets the norm of the one with the caption, over the last dim of the packed latent.
    """

    steps: int = 50
    guidance: float = 5.0
    sigmas: Callable[[int], list[float]] | None = None
    time: Callable[[float], float] = per_thousand
    sign: float = 1.0
    pack: Callable[[Tensor], Tensor] = lambda x_BCThw: x_BCThw
    unpack: Callable[[Tensor, Tensor], Tensor] = lambda x, like_BCThw: x
    renormed: bool = False

    def guided(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """The prediction under classifier-free guidance, (B, C, T, h, w) as both."""
        both = uncond + scale * (cond - uncond)
        if not self.renormed:
            return both
        rows, mixed = self.pack(cond), self.pack(both)
        ratio = torch.norm(rows, dim=-1, keepdim=True) / torch.norm(mixed, dim=-1, keepdim=True)
        return self.unpack(mixed * ratio, cond)


@dataclass(frozen=True)
class ImageRecipe:
    """The use of a repository's image encoder, whose embedding of a conditioning frame the model takes.

    Args:
        encoder, processor: folders in the repository.
        layer: hidden state, counted from the end; None: the last one, after the encoder's own norm.
        processing: settings of the processor's call.
        version: counts up when the same files give other numbers.
    """

    encoder: str = "image_encoder"
    processor: str = "image_processor"
    layer: int | None = None
    processing: Mapping[str, bool] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class Family:
    """A family of published video transformers of one class.

    Args:
        name: its name in messages and on the command line.
        transformer: the name of its class in diffusers.
        call: the call of the class's forward, where nothing else is known.
        small: rules for small models of it; None for a class of ours, which its task makes small.
        variant: the call that a repository asks for, by its model_index.json and the settings of its parts; None: always `call`.
        sampling: what its pipeline does around the scheduler.
        other_sampling: the same of further pipelines, by their classes.
        text: the use of its text encoders; None where it is not known.
        image: the use of its image encoder; None for families without one.
        from_images: the pipeline of diffusers that makes videos from images; None: there is none.
        one_image: True where that pipeline takes one image for all prompts, not one for each.
        image_in_latents: True where it takes latents for those that hold the image already, not for noise.
        control: the argument of its pipeline that takes a control video; None: it takes none.
        text_variant: the use that a repository asks for, by its model_index.json and the settings of its parts; None: always `text`.
        published: repositories by the short names that `mmspeed init --model` takes; the first is the usual one.
        unused: patterns (as of fnmatch) of the parameters that training as `call` says never reaches, which are frozen; in a pattern
            `-1` stands for the last block of a list.
        seeded: True for a class of ours, whose weights begin from a seed; the others begin with a repository's.
    """

    name: str
    transformer: str
    call: ModelCall
    small: SmallClass | None
    variant: Callable[[Index, Parts], ModelCall] | None = None
    sampling: Sampling = Sampling()
    other_sampling: Mapping[str, Sampling] = field(default_factory=dict)
    text: TextRecipe | None = None
    image: ImageRecipe | None = None
    from_images: str | None = None
    one_image: bool = False
    image_in_latents: bool = False
    control: str | None = None
    text_variant: Callable[[Index, Parts], TextRecipe] | None = None
    published: Mapping[str, Published] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    seeded: bool = False

    def call_of(self, index: Index, parts: Parts) -> ModelCall:
        """The call of a repository's transformer. `index`: the contents of its model_index.json, which may state the call's own fields."""
        if isinstance(own := index.get(OWN_CALL), Mapping) and is_dataclass(self.call):
            stated: ModelCall = replace(self.call, **own)
            return stated
        return self.call if self.variant is None else self.variant(index, parts)

    def sampling_of(self, index: Index) -> Sampling:
        """The settings of a repository's pipeline around the scheduler."""
        return self.other_sampling.get(index.get("_class_name", ""), self.sampling)

    @property
    def small_class(self) -> SmallClass:
        """The rules for small models of a published class."""
        assert self.small is not None, self.name
        return self.small

    def always_unused(self, names: Sequence[str]) -> list[str]:
        """The parameters that no training reaches, with or without given frames: those listed of last blocks."""
        return matching((pattern for pattern in self.unused if LAST in pattern.split(".")), names)

    def text_of(self, index: Index, parts: Parts) -> TextRecipe | None:
        """The use of a repository's text encoders; None where it is not known."""
        return self.text if self.text_variant is None else self.text_variant(index, parts)


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The names that match one of the patterns (as of fnmatch), in which the part `-1` stands for the last block of its list."""
    whole = []
    for pattern in patterns:
        before, last, after = pattern.partition(f".{LAST}.")
        places = [name[len(before) + 1 :].partition(".")[0] for name in names if name.startswith(f"{before}.")]
        numbers = [int(place) for place in places if place.isdigit()]
        whole.append(f"{before}.{max(numbers)}.{after}" if last and numbers else pattern)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in whole)]


def token_grid(latent: tuple[int, ...], patch: tuple[int, ...]) -> Latent:
    """Tokens along time, height and width. Raises ValueError, with the nearest sizes, where the patch does not divide the latent."""
    for label, size, step in zip(("frames", "height", "width"), latent, patch, strict=True):
        if size % step:
            lower = size // step * step
            near = f"{lower} or {lower + step}" if lower else f"{step}"
            raise ValueError(
                f"latent {label} {size} of {tuple(latent)} is no multiple of {step} of the model's patch: use {near}"
            )
    t, h, w = (size // step for size, step in zip(latent, patch, strict=True))
    return t, h, w


def width_of(config: Config) -> int:
    """The model's width, of all its attention heads."""
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def outputs_of(config: Config) -> int:
    """The number of channels that the model returns."""
    return int(config["out_channels"] or config["in_channels"])


def check_sizes(
    name: str, config: Config, channels: int, text_width: int, text_key: str, takes_frames: bool = False
) -> None:
    """Raises UserError where latents or captions have other sizes than the model's.

    takes_frames: True where the channels that are not returned hold conditioning frames.
    """
    outputs = outputs_of(config)
    inputs = outputs if takes_frames else config["in_channels"]
    if inputs != channels or outputs != channels:
        raise UserError(
            f"{name} takes {inputs} channels and returns {outputs}, the latents here have {channels}: name the model's own codec under "
            "`vae` (a model that takes more than it returns is for image-to-video of a kind that is not known here)"
        )
    if config[text_key] != text_width:
        raise UserError(
            f"{name} takes captions of width {config[text_key]}, here {text_width}: name the model's own text encoder under `text`"
        )


def only_images(latent: tuple[int, ...]) -> None:
    """Raises ValueError for a latent of several frames, in a family of images."""
    if latent[0] != 1:
        raise ValueError(
            f"latent frames {latent[0]} of {tuple(latent)}: the model makes images: use buckets of 1 frame"
        )


def per_token(t_B: Tensor, tokens: int) -> Tensor:
    """Times of tokens (B, N), from times of samples (B,), or of latent frames (B, T) whose tokens follow one another."""
    if t_B.ndim == 2:
        return t_B.repeat_interleave(tokens // t_B.shape[1], dim=1)
    return t_B[:, None].expand(-1, tokens)


def pooled_of(name: str, conditions: Conditions, width: int) -> Tensor:
    """Pooled vectors (B, D). Raises UserError where captions have none, or some of another width."""
    pooled_BD = conditions.pooled_BD
    if pooled_BD is None or pooled_BD.shape[1] != width:
        pooled = "none" if pooled_BD is None else f"one of width {pooled_BD.shape[1]}"
        raise UserError(
            f"{name} needs a pooled vector of width {width} for each caption, the text encoder gave {pooled}: "
            "encode captions with one that has it, such as CLIP's"
        )
    return pooled_BD


def filled(conditions: Conditions, tokens: int, dtype: torch.dtype) -> Tensor:
    """Captions padded with zeros to `tokens` tokens. Raises UserError for longer ones."""
    length = conditions.text_BLD.shape[1]
    if length > tokens:
        raise UserError(f"a caption has {length} tokens, the model takes {tokens}: set text.max_tokens: {tokens}")
    text_BLD = conditions.text_BLD.to(dtype).masked_fill(~conditions.text_mask_BL[..., None], 0.0)
    return F.pad(text_BLD, (0, 0, 0, tokens - length))


def packed(x_BCThw: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """A latent as tokens (B, N, C x patch)."""
    b, c = x_BCThw.shape[:2]
    (t, h, w), (p_t, p_h, p_w) = token_grid(tuple(x_BCThw.shape[2:]), patch), patch
    parts = x_BCThw.reshape(b, c, t, p_t, h, p_h, w, p_w)
    return parts.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpacked(tokens_BNP: Tensor, like_BCThw: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """The latent of these tokens, of a known shape."""
    (t, h, w), (p_t, p_h, p_w) = token_grid(tuple(like_BCThw.shape[2:]), patch), patch
    parts = tokens_BNP.unflatten(2, (-1, p_t, p_h, p_w)).unflatten(1, (t, h, w))
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like_BCThw.shape)


def first_output(output: Any) -> Tensor:
    """The sample in a class's output, a tuple."""
    sample: Tensor = output[0]
    return sample


def small_channels(config: Config, channels: int) -> dict[str, Any]:
    """Numbers of input and output channels; a model that takes latents of conditioning frames and masks, too, keeps so many of both."""
    latents, masks = divmod(config["in_channels"], outputs_of(config))
    return {"in_channels": latents * channels + masks, "out_channels": channels}


def channels_of_frames(name: str, conditions: Conditions, like_BCThw: Tensor) -> tuple[Tensor, Tensor]:
    """(bool (B, T), True at conditioning frames; their latents (B, C, T, h, w)) of a model that takes these as channels.

    Raises UserError where the task gives no frames.
    """
    mask_BT, condition_BCThw = conditions.conditioning_mask, conditions.named.get("condition")
    if mask_BT is None or condition_BCThw is None:
        raise UserError(f"{name} takes given frames: set the section `conditioning`, such as {{first: 1}}")
    return mask_BT, condition_BCThw.to(like_BCThw)


def pictures_of(name: str, conditions: Conditions, width: int) -> Tensor:
    """Embeddings (B, pictures, rows, D) of given pictures. Raises UserError without them, and for those of another width."""
    image_BKLD = conditions.named.get("image")
    if image_BKLD is None or image_BKLD.shape[-1] != width:
        other = "none" if image_BKLD is None else f"one of width {image_BKLD.shape[-1]}"
        raise UserError(
            f"{name} takes an image encoder's embedding of width {width} of each given frame, here {other}: name a repository with the "
            "model's own image encoder"
        )
    return image_BKLD


def _plain(value: Any) -> Any:
    """The argument as the class takes it, from one that was read from JSON."""
    return tuple(value) if isinstance(value, list) else value
