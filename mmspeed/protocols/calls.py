"""Calls of published video transformers: the interface between a class and the video task, which knows no class.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import pad

from mmspeed.errors import UserError
from mmspeed.shapes import Strides

from .task import Work

# names of the embeddings of the pictures that a mode gives
PICTURES: Mapping[str, tuple[str, ...]] = {"first": ("image_first",), "first_last": ("image_first", "image_last")}
BLANK = "blank"  # the role of a grey video of a clip's size, which stands beside others and has no column
IMAGES = tuple(dict.fromkeys(name for names in PICTURES.values() for name in names))

# The quantity that a model was trained to predict: "velocity", noise - data of a flow; "v" of a denoising diffusion of 1000 steps.
# "any": what the objective asks for, of a class that begins untrained.
Predicted = Literal["velocity", "v", "any"]


def latents_name(role: str) -> str:
    """The name in a batch of the latents of a role of the samples."""
    return f"{role}.latents"


@dataclass(frozen=True)
class Conditions:
    """The inputs of a prediction beside the noisy latent and its time.

    Args:
        text_BLD: captions, zeros behind the real tokens.
        text_mask_BL: bool, True at real tokens.
        pooled_BD: one vector for each caption, where the text encoder gives one.
        fps_B: frames per second of each clip, float32; of an image any number.
        strides: frames and pixels that a latent position covers.
        named: further inputs by their names in a batch: captions of a second encoder (`text_2`, (B, L, D)) with their mask (`text_2_mask`),
        those of conditioning frames, and latents of further roles (see `Conditioning`).
    """

    text_BLD: Tensor
    text_mask_BL: Tensor
    pooled_BD: Tensor | None = None
    fps_B: Tensor | None = None
    strides: Strides | None = None
    named: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def conditioning_mask(self) -> Tensor | None:
        """bool (B, T), True at conditioning frames; None where the task gives none."""
        return self.named.get("conditioning_mask")

    def latents_of(self, role: str) -> Tensor:
        """Latents (B, C, T, h, w) of a role of the samples. Raises UserError where the data have none."""
        name = latents_name(role)
        if name not in self.named:
            raise UserError(
                f"the model takes the role `{role}`, and the samples have none: name its column, data.sources[].roles"
            )
        return self.named[name]

    def with_text_of(self, tokens: int) -> Conditions:
        """The conditions with captions of at least so many tokens, zeros that the mask leaves out behind shorter ones."""
        missing = tokens - self.text_BLD.shape[1]
        if missing <= 0:
            return self
        text_BLD, mask_BL = pad(self.text_BLD, (0, 0, 0, missing)), pad(self.text_mask_BL, (0, missing))
        return replace(self, text_BLD=text_BLD, text_mask_BL=mask_BL)

    def times_of(self, t_B: Tensor) -> Tensor:
        """The times as a model with times of frames takes them: (B, T), 0 at conditioning frames; (B,) where the task gives none."""
        return t_B if self.conditioning_mask is None else t_B[:, None].where(~self.conditioning_mask, 0.0)


@dataclass(frozen=True)
class Conditioning:
    """The ways in which a model takes conditioning frames.

    Args:
        modes: those of the config section `conditioning` that it can be trained in.
        how: `replace`: they are clean latents at time 0, without loss. Otherwise their latents are further channels
            (`condition` in `Conditions.named`), and all frames are noisy and count: with `grey` they are the codec's latents of the
            video with grey in all other frames, with `zeros` the latent of the first frame and zeros after it.
        alone: True where the first frame is given as the codec encodes it alone, which is stored beside the clip's own latent.
        drawn: True where that latent is a draw from the codec's posterior; else it is the mean.
        blend: share of the first frame in the noise that sampling begins with.
        cut: frames in front that a sampled video loses.
        embedding: (rows, width) of an image encoder's embedding of each given picture, which the model takes beside the latents (`image` in
            `Conditions.named`, (B, pictures, rows, width)); None: it takes none.
        whole: True where the pipeline embeds a picture as it is given; else what of it is in the video.
        roles: further roles of a sample whose latents, of the size of the clip's own, the model always takes (`control.latents` in
            `Conditions.named`): `control`, and `blank`, a grey video, which stands beside it.
    """

    modes: tuple[str, ...] = ("none",)
    how: Literal["replace", "grey", "zeros"] = "replace"
    alone: bool = False
    drawn: bool = False
    blend: float = 0.0
    cut: int = 0
    embedding: tuple[int, int] | None = None
    whole: bool = False
    roles: tuple[str, ...] = ()

    @property
    def always(self) -> bool:
        """True for a model that makes no video of a caption alone."""
        return "none" not in self.modes or bool(self.roles)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names in a batch of what the model may be given beside captions."""
        return "conditioning_mask", "condition", "image", *map(latents_name, self.roles)

    def pictures(self, mode: str) -> tuple[str, ...]:
        """Names of the embeddings of the pictures that a mode gives, in their order in a batch."""
        return () if self.embedding is None else PICTURES.get(mode, ())

    @property
    def image_size(self) -> tuple[int, int, int] | None:
        """(pictures, rows, width) of a sample's embeddings, as many in all modes; None for a model that takes none."""
        return (
            None if self.embedding is None else (max(len(self.pictures(mode)) for mode in self.modes), *self.embedding)
        )

    def stored(self, modes: Iterable[str]) -> tuple[str, ...]:
        """Names of the tensors that an entry needs beside the clip's own latent for these modes.

        They are `first`, or `grey_` and the mode, and embeddings (`image_first`).
        """
        frames = [mode for mode in modes if mode != "none"]
        images = tuple(dict.fromkeys(name for mode in frames for name in self.pictures(mode)))
        if self.how == "grey":
            return (*(f"grey_{mode}" for mode in frames), *images)
        if not self.alone or not {"first", "first_last"} & set(frames):
            return images
        return ("first", *(["first_logvar"] if self.drawn else []), *images)


@runtime_checkable
class TakesConditioning(Protocol):
    """A call of models that can take conditioning frames."""

    def conditioning(self, config: Mapping[str, Any]) -> Conditioning:
        """The ways in which a model of these arguments takes conditioning frames."""
        ...


class ModelCall(Protocol):
    """The call of one class's forward, and its cost. Data and pure functions; `config` is the model's own."""

    @property
    def predicts(self) -> Predicted:
        """The quantity that the class was trained to predict."""
        ...

    @property
    def timed(self) -> bool:
        """True for a class that takes the frames per second of each clip."""
        ...

    def pooled_width(self, config: Mapping[str, Any]) -> int:
        """Width of the vector of a whole caption that the model takes; 0: it takes none."""
        ...

    def check(self, config: Mapping[str, Any], channels: int, text_width: int) -> None:
        """Raises UserError for a model that cannot be trained on latents of `channels` channels and captions of width `text_width`."""
        ...

    def call(self, config: Mapping[str, Any], x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward, by name. `t_B` is float32 in [0, 1]: 0 data, 1 noise. Raises UserError for a missing input."""
        ...

    def prediction(self, config: Mapping[str, Any], output: Any, x_BCThw: Tensor) -> Tensor:
        """The prediction in the forward's `output`, of the shape of `x_BCThw`."""
        ...

    def tokens(self, config: Mapping[str, Any], latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w). Raises ValueError for a latent that does not fit the model."""
        ...

    def flops(self, config: Mapping[str, Any], latent: tuple[int, int, int], text_tokens: int) -> int:
        """Operations in matrix products of the forward pass of one sample (a multiply-add counts as two)."""
        ...


@runtime_checkable
class TakesTexts(Protocol):
    """A call that takes captions of further encoders, by their names in `Conditions.named`, each with a mask (`text_2`, `text_2_mask`)."""

    def texts(self, config: Mapping[str, Any]) -> Mapping[str, int]:
        """Widths of these captions."""
        ...


@runtime_checkable
class CountsWork(Protocol):
    """A call that counts the work of a forward pass by kind."""

    def work(self, config: Mapping[str, Any], latent: tuple[int, int, int], text_tokens: int) -> Work:
        """Work of the forward pass of one sample, if all attention were dense."""
        ...


@runtime_checkable
class Configured(Protocol):
    """A model of diffusers, which carries the arguments that it was made with."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments by name."""
        ...
