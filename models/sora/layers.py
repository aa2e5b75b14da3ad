"""Layers of diffusion transformers.

Legend: B batch (samples; sample x row or column inside an attention), T S rows and columns of the tokens (frames x places of
a frame; one row of all tokens where all attend to all), N tokens of an attention, F frames of a sample, L caption tokens, A heads,
D head width, E model width, C T h w channels, frames, height, width of a latent, P values of a patch, X position axes, G rows or
columns that attend apart, H half of D, 2 cosine and sine.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.compute.operators.norms import fused_rms_norm
from mmspeed.compute.rope import rope_cos_sin, rope_dtype, turned
from mmspeed.compute.structured import Attend
from mmspeed.protocols.plan import Structure

AttentionType = Literal["spatial", "temporal", "full"]

# Rotary positions are relative, so axes (t, h, w) along which a span does not vary are left out of its head width.
POSITION_AXES = {"spatial": slice(1, 3), "temporal": slice(0, 1), "full": slice(0, 3)}
TIME_CHANNELS = 256
NORM_EPS = 1e-6


def patchify(x_BCThw: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Tokens `x_BNP` of a latent, row by row; P = channels x patch volume. The sizes must divide."""
    batch, channels, frames, height, width = x_BCThw.shape
    pt, ph, pw = patch
    x = x_BCThw.reshape(batch, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    x = x.permute(0, 2, 4, 6, 1, 3, 5, 7)  # B T' h' w' C pt ph pw
    return x.reshape(batch, -1, channels * pt * ph * pw)


def unpatchify(x_BNP: Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> Tensor:
    """The latent `x_BCThw` of tokens; the inverse of `patchify`. `grid` is the number of patches along T, h, w."""
    (pt, ph, pw), (t, h, w) = patch, grid
    x = x_BNP.reshape(x_BNP.shape[0], t, h, w, -1, pt, ph, pw)
    x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)  # B C T' pt h' ph w' pw
    return x.reshape(x_BNP.shape[0], -1, t * pt, h * ph, w * pw)


def position_turns(pos_NX: Tensor, along: AttentionType, head_width: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines `turn_2NH` of rotary positions along a span, in `rope_dtype(dtype)`."""
    return torch.stack(rope_cos_sin(pos_NX[:, POSITION_AXES[along]], head_width, dtype=rope_dtype(dtype)))


def timestep_embedding(t: Tensor, channels: int = TIME_CHANNELS) -> Tensor:
    """Sinusoidal embedding (..., channels) of 1000 t in float32, as in DDPM and DiT."""
    half = channels // 2
    steps = torch.arange(half, device=t.device, dtype=torch.float32) / half
    angle = 1000.0 * t.float()[..., None] * torch.exp(-math.log(10_000.0) * steps)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def modulate(x_BTSE: Tensor, shift_BTSE: Tensor, scale_BTSE: Tensor) -> Tensor:
    """The value of x (1 + scale) + shift; shift and scale may be the same for all tokens of a sample, or of a frame (T or S are 1)."""
    return x_BTSE * (1 + scale_BTSE) + shift_BTSE


def of_tokens(cond: Tensor, frame_TS: Tensor) -> Tensor:
    """Conditioning of samples (B, E) or of frames (B, F, E), broadcast to tokens: (B, 1, 1, E) or (B, T, 1 or S, E)."""
    return cond[:, None, None] if cond.dim() == 2 else cond[:, frame_TS]


class NormLinear(nn.Linear):
    """LayerNorm without weights of its own, modulation, product (adaLN: Peebles & Xie 2023)."""

    def forward(self, x_BTSE: Tensor, shift: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.project(self.prepare(x_BTSE, shift, scale))

    def prepare(self, x_BTSE: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """The normed and modulated input; shift and scale (B, 1 or T, 1 or S, E)."""
        return modulate(F.layer_norm(x_BTSE, x_BTSE.shape[-1:], eps=NORM_EPS), shift, scale)

    def project(self, x_BTSE: Tensor) -> Tensor:
        """The product."""
        return F.linear(x_BTSE, self.weight, self.bias)


class AffineNormLinear(NormLinear):
    """LayerNorm with given weights (E), product."""

    def prepare(self, x_BTSE: Tensor, weight_E: Tensor, bias_E: Tensor) -> Tensor:
        """The normed input."""
        return F.layer_norm(x_BTSE, x_BTSE.shape[-1:], weight_E, bias_E, NORM_EPS)


class FinalLinear(NormLinear):
    """The last layer, whose conditioning is of samples (B, E) or of frames (B, F, E); `frame_TS`: the frame of each token."""

    def forward(self, x_BTSE: Tensor, shift: Tensor, scale: Tensor, frame_TS: Tensor) -> Tensor:  # type: ignore[override]
        return self.project(self.prepare(x_BTSE, of_tokens(shift, frame_TS), of_tokens(scale, frame_TS)))


class ActLinear(nn.Linear):
    """GELU (tanh form), product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.prepare(x))

    def prepare(self, x: Tensor) -> Tensor:
        """The activated input."""
        return F.gelu(x, approximate="tanh")

    def project(self, x: Tensor) -> Tensor:
        """The product."""
        return F.linear(x, self.weight, self.bias)


class TextMlp(nn.Module):
    """Linear, GELU, linear: captions to the model's width."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width_in, width)
        self.down = ActLinear(width, width)

    def forward(self, text_BLD: Tensor) -> Tensor:
        return self.down(self.up(text_BLD))


class Mlp(nn.Module):
    """Norm, linear, GELU, linear, gated and added."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = NormLinear(width, hidden)
        self.down = ActLinear(hidden, width)

    def forward(self, x_BTSE: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return x_BTSE + gate * self.down(self.up(x_BTSE, shift, scale))


class TimeEmbedder(nn.Module):
    """The conditioning vector of timesteps of any shape: sinusoids, then linear, SiLU, linear, SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(TIME_CHANNELS, width)
        self.out = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        sinusoids = timestep_embedding(t).to(self.up.weight.dtype)
        return F.silu(self.out(F.silu(self.up(sinusoids))))


class HeadNorm(nn.RMSNorm):
    """RMSNorm over the head width (QK-norm, Henry et al. 2020), in the dtype of its input, under autocast too."""

    def __init__(self, head_width: int) -> None:
        super().__init__(head_width, eps=NORM_EPS)

    def forward(self, x_BAND: Tensor) -> Tensor:
        return fused_rms_norm(x_BAND, self.weight, NORM_EPS)


class SelfAttention(nn.Module):
    """Norm, self-attention with QK-norm and rotary positions along one dim of the tokens, gated and added.

    The fused projection is laid out head by head (head, q/k/v, D), so that splitting its rows splits heads: the number of heads is
    read off its output.
    """

    def __init__(self, width: int, heads: int, along: AttentionType, attend: nn.Module) -> None:
        super().__init__()
        self.head_width, self.along = width // heads, along
        self.attend = attend
        self.qkv = NormLinear(width, 3 * width, bias=False)
        self.q_norm = HeadNorm(self.head_width)
        self.k_norm = HeadNorm(self.head_width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x_BTSE: Tensor,
        shift: Tensor,
        scale: Tensor,
        gate: Tensor,
        pos_NX: Tensor,
        turn_2NH: Tensor,
        mask_BTS: Tensor | None,
        image: bool,
    ) -> Tensor:
        """Tokens attend along T (each column for itself) in a temporal block, else along S (each row for itself)."""
        qkv = self.qkv(x_BTSE, shift, scale).unflatten(-1, (-1, 3, self.head_width))  # B T S A 3 D
        rows = qkv.shape[:2]
        temporal = self.along == "temporal"
        # columns: (B, S, A, T, D), as no view makes one dim of B and S; rows: (B T, A, S, D)
        qkv = qkv.permute(4, 0, 2, 3, 1, 5) if temporal else qkv.permute(4, 0, 1, 3, 2, 5).flatten(1, 2)
        q_BAND, k_BAND, v_BAND = qkv.unbind(0)
        q_BAND, k_BAND = turned(self.q_norm(q_BAND), turn_2NH), turned(self.k_norm(k_BAND), turn_2NH)
        if mask_BTS is not None:
            mask_BTS = (mask_BTS.transpose(1, 2) if temporal else mask_BTS).flatten(0, 1)  # B N
        out_BAND = self.attend(q_BAND, k_BAND, v_BAND, Structure(mask_BTS, pos_NX, image))
        out = out_BAND.permute(0, 3, 1, 2, 4) if temporal else out_BAND.unflatten(0, rows).transpose(2, 3)  # B T S A D
        return x_BTSE + gate * self.out(out.flatten(3))


class CrossAttention(nn.Module):
    """Norm, attention from tokens to the caption with QK-norm and no positions (the text encoder adds them), added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width, self.attend = width // heads, Attend()
        self.q = AffineNormLinear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.q_norm = HeadNorm(self.head_width)
        self.k_norm = HeadNorm(self.head_width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x_BTSE: Tensor, weight_E: Tensor, bias_E: Tensor, text_BLE: Tensor, text_mask_BL: Tensor
    ) -> Tensor:
        q_BTSE = self.q(x_BTSE, weight_E, bias_E)
        q_BAND = q_BTSE.flatten(1, 2).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        kv = self.kv(text_BLE).unflatten(-1, (-1, 2, self.head_width))  # B L A 2 D
        k_BALD, v_BALD = kv.permute(3, 0, 2, 1, 4).unbind(0)
        out_BAND = self.attend(self.q_norm(q_BAND), self.k_norm(k_BALD), v_BALD, Structure(text_mask_BL))
        return x_BTSE + self.out(out_BAND.transpose(1, 2).flatten(2).unflatten(1, q_BTSE.shape[1:3]))
