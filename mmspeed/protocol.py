"""What the floors ask of each other: the shapes of the plug-in points, and nothing that computes.

Legend: B batch, C channels, F H W pixels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

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
    noise_BCThw: Tensor | None = None  # what training mixes in, drawn by name; None where none was asked for
    u_B: Tensor | None = None  # float64 in [0, 1): the quantile of each sample's time. It stays on the CPU

    @property
    def size(self) -> int:
        return len(self.names)

    def to(self, device: torch.device, dtype: torch.dtype, non_blocking: bool = False) -> Batch:
        """The batch on `device`; latents, noise and text become `dtype`. What is so already is not copied.

        With `non_blocking` the copies may still be under way when this returns.
        """

        def move(tensor: Tensor) -> Tensor:
            keeps = tensor is self.text_mask_BL or tensor is self.weights_B
            return tensor.to(device, tensor.dtype if keeps else dtype, non_blocking=non_blocking)

        return self._each(move)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which an accelerator copies beside its computation."""
        return self._each(lambda tensor: tensor.pin_memory())

    def movable(self) -> dict[str, Tensor]:
        """The tensors that go to the device, by their fields: all but `u_B`."""
        fields = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        fields.pop("u_B", None)
        return fields

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.movable().items()}
        return replace(self, **changed)


# What a linear layer is to its model: "column": each row of its weight makes a channel of its own (heads, hidden units);
# "row": its inputs are such channels. Between a column layer and its row layer channels never mix.
Role = Literal["column", "row"]


class DiffusionModel(Protocol):
    """All that the core asks of a diffusion transformer. A model names no mesh axis."""

    blocks: nn.ModuleList  # what is sharded, recomputed and compiled one by one

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w)."""
        ...

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """Floating-point operations of the forward pass of one sample (a multiply-add counts as two)."""
        ...

    def forward(self, x_BCThw: Tensor, t: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        """The prediction, of the shape of `x_BCThw`. `t` (B,) is in [0, 1]: 0 data, 1 noise."""
        ...


# What becomes of a buffer that a run changes: "averaged": the moving average follows it too, and validation meets the average;
# "kept": validation meets it as it is.
StateRule = Literal["averaged", "kept"]


@runtime_checkable
class DeclaredState(Protocol):
    """A module some of whose buffers belong to the state of a run, though no gradient trains them: a threshold, a router's bias.

    Checkpoints hold them whether they are persistent or not, and so restore them in every layout. Every process has the whole of each,
    and all change it alike. One that a checkpoint lacks, as a checkpoint of before it was declared, stays as the model has it.
    """

    @property
    def state_buffers(self) -> Mapping[str, StateRule]:
        """The rule of each such buffer, by its name in this module. Averaged ones are float32."""
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
