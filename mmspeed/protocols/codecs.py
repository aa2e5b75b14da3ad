"""Frozen encoders from videos and captions to the inputs of a model.

Legend: B batch, C channels, F H W pixels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mmspeed.shapes import Strides


@dataclass(frozen=True)
class TextEntry:
    """An encoded caption: real tokens only, no padding but that which a model takes as it takes tokens.

    `pooled_D` is one vector for the whole caption, which some encoders give and some models take. `others` holds the rows (L, D) of
    further encoders under their names in a batch, such as `text_2`; there may be none of them (L = 0).
    """

    embeds_LD: Tensor
    pooled_D: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Posterior:
    """A latent as its codec gives it, in the model's normalised space: mean and log-variance.

    `logvar_BCThw` is None when the codec is deterministic.
    """

    mean_BCThw: Tensor
    logvar_BCThw: Tensor | None = None


class VideoCodec(Protocol):
    """A frozen autoencoder between pixels in [-1, 1] and normalised latents."""

    channels: int
    strides: Strides
    fingerprint: str  # of weights and settings; part of every latent's key

    def encode(self, video_BCFHW: Tensor) -> Posterior:
        """Posterior of the latents of a video or (F = 1) an image."""
        ...

    def decode(self, latents_BCThw: Tensor) -> Tensor:
        """Pixels (B, 3, F, H, W) in [-1, 1]."""
        ...


class TextEncoder(Protocol):
    """A frozen text encoder."""

    width: int
    fingerprint: str  # of weights, tokenizer and length limit; part of every text's key

    def encode(self, captions: list[str]) -> list[TextEntry]:
        """The real tokens of each caption. The empty caption gives at least one token."""
        ...
