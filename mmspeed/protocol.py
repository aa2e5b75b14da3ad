"""What the floors ask of each other: the shapes of the plug-in points, and nothing that computes.

Legend: B batch, C channels, F H W pixels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .shapes import Bucket, Strides


@dataclass(frozen=True)
class TextEntry:
    """One encoded caption: real tokens only, no padding."""

    embeds_LD: Tensor
    pooled_D: Tensor | None = None


@dataclass(frozen=True)
class Posterior:
    """What a codec says of a latent, in the model's normalised space: mean and log-variance.

    `logvar_BCThw` is None when the codec is deterministic.
    """

    mean_BCThw: Tensor
    logvar_BCThw: Tensor | None = None


@dataclass
class Batch:
    """Samples of one shape, as the model meets them."""

    latents_BCThw: Tensor
    text_BLD: Tensor
    text_mask_BL: Tensor  # bool, True at real tokens
    weights_B: Tensor  # 1 for samples, 0 for fillers that keep ranks in step
    names: list[tuple[str, int, int]]  # (sample key, epoch, repeat) of each sample: what its random draws are keyed by
    bucket: Bucket
    sources: list[str]  # for messages
    pooled_BD: Tensor | None = None  # each caption's pooled vector, where the text encoder has one

    @property
    def size(self) -> int:
        return len(self.names)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch on `device`; latents and text become `dtype`."""
        return Batch(
            latents_BCThw=self.latents_BCThw.to(device, dtype),
            text_BLD=self.text_BLD.to(device, dtype),
            text_mask_BL=self.text_mask_BL.to(device),
            weights_B=self.weights_B.to(device),
            names=self.names,
            bucket=self.bucket,
            sources=self.sources,
            pooled_BD=None if self.pooled_BD is None else self.pooled_BD.to(device, dtype),
        )


class DiffusionModel(Protocol):
    """All that the core asks of a diffusion transformer. A model names no mesh axis."""

    blocks: nn.ModuleList  # what is sharded, recomputed and compiled one by one

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w)."""
        ...

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """Floating-point operations of the forward pass of one sample (a multiply-add counts as two)."""
        ...

    def forward(self, x_BCThw: Tensor, t_B: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        """The prediction, of the shape of `x_BCThw`. `t_B` is in [0, 1]: 0 data, 1 noise."""
        ...


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
        """Each caption's real tokens. The empty caption gives at least one token."""
        ...
