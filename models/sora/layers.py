"""Parts that diffusion transformers are made of.

Legend: B batch (samples; sample x row or column inside an attention), T S rows and columns of the tokens (see
`mmspeed.parallel.tokens`), N tokens, L caption tokens, A heads, D head width, E model width, C T h w channels, frames, height,
width of a latent, P values of a patch, X position axes, G rows or columns that attend apart, H half of D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.compute.rope import apply_rope, rope_cos_sin
from mmspeed.memory.chunked import chunked_mlp, in_chunks
from mmspeed.memory.recompute.spans import region
from mmspeed.parallel.tensor import applied
from mmspeed.parallel.tokens import Attend, TokenShard

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


def timestep_embedding(t: Tensor, channels: int = TIME_CHANNELS) -> Tensor:
    """Sinusoidal embedding (..., channels) of 1000 t in float32, as in DDPM and DiT."""
    half = channels // 2
    steps = torch.arange(half, device=t.device, dtype=torch.float32) / half
    angle = 1000.0 * t.float()[..., None] * torch.exp(-math.log(10_000.0) * steps)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def modulate(x_BTSE: Tensor, shift_BTSE: Tensor, scale_BTSE: Tensor) -> Tensor:
    """x (1 + scale) + shift; shift and scale may be the same for all tokens of a sample, or of a frame (T or S are 1)."""
    return x_BTSE * (1 + scale_BTSE) + shift_BTSE


Before = Callable[[Tensor], Tensor]  # what comes before a layer's first product, such as its norm


def nothing_before(x: Tensor) -> Tensor:
    """Of a layer whose input comes as it is."""
    return x


def gelu(x: Tensor) -> Tensor:
    """In the tanh form."""
    return F.gelu(x, approximate="tanh")


class Mlp(nn.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width_in, hidden)
        self.down = nn.Linear(hidden, width_out)
        self.token_chunk: int | None = None  # tokens of all samples that are computed at a time; None: all
        # with the gradients of the whole, for two more products; `up` and `down` are then read, not called
        self.exact_chunks = True

    def forward(self, x: Tensor, before: Before = nothing_before) -> Tensor:
        if self.token_chunk is not None:
            x = before(x)
            return self._in_parts(x.flatten(0, -2), self.token_chunk).unflatten(0, x.shape[:-1])
        hidden = region(self, "norm", self.up, x, before=before)
        return region(self, "activation", self.down, hidden, before=gelu)

    def _in_parts(self, x_NE: Tensor, size: int) -> Tensor:
        if self.exact_chunks:
            return chunked_mlp(x_NE, applied(self.up), gelu, applied(self.down), size)
        return in_chunks(lambda x_PE: self.down(gelu(self.up(x_PE))), x_NE, 0, size)


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
    """RMSNorm over the head width (QK-norm, Henry et al. 2020), in the dtype of its input.

    Autocast on CUDA computes it in float32; attention casts back.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__(head_width, eps=NORM_EPS)

    def forward(self, x_BAND: Tensor) -> Tensor:
        return F.rms_norm(x_BAND, self.normalized_shape, self.weight.to(x_BAND.dtype), self.eps)


class SelfAttention(nn.Module):
    """Self-attention with QK-norm and rotary positions along one dim of the tokens.

    The fused projection is laid out head by head (head, q/k/v, D), so that splitting its rows splits heads: how many heads there
    are is read off its output.
    """

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.head_width, self.attend = width // heads, attend
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = HeadNorm(self.head_width)
        self.k_norm = HeadNorm(self.head_width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x_BTSE: Tensor, part: TokenShard, along: AttentionType, before: Before = nothing_before
    ) -> Tensor:
        """Tokens attend along T (each column for itself) in a temporal span, else along S (each row for itself)."""
        qkv_BTSE = region(self, "norm", self.qkv, x_BTSE, before=before)
        batch, rows, columns, _ = qkv_BTSE.shape
        temporal = along == "temporal"
        apart = columns if temporal else rows
        qkv = qkv_BTSE.unflatten(-1, (-1, 3, self.head_width))  # B T S A 3 D
        order = (4, 0, 2, 3, 1, 5) if temporal else (4, 0, 1, 3, 2, 5)
        q_BAND, k_BAND, v_BAND = qkv.permute(order).flatten(1, 2).unbind(0)  # B is batch x the other dim
        cos_NH, sin_NH = rope_cos_sin(part.pos_NX[:, POSITION_AXES[along]], self.head_width)
        q_BAND = apply_rope(self.q_norm(q_BAND), cos_NH, sin_NH)
        k_BAND = apply_rope(self.k_norm(k_BAND), cos_NH, sin_NH)
        mask_BN = part.mask_BTS
        if mask_BN is not None:
            mask_BN = (mask_BN.transpose(1, 2) if temporal else mask_BN).flatten(0, 1)
        out = part.attend(self.attend, q_BAND, k_BAND, v_BAND, mask_BN).unflatten(0, (batch, apart))  # B G A N D
        out = out.permute(0, 3, 1, 2, 4) if temporal else out.permute(0, 1, 3, 2, 4)  # B T S A D
        return self.out(out.flatten(3))


class CrossAttention(nn.Module):
    """Attention from tokens to the caption, with QK-norm and no positions (the text encoder gave them)."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.head_width, self.attend = width // heads, attend
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.q_norm = HeadNorm(self.head_width)
        self.k_norm = HeadNorm(self.head_width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x_BTSE: Tensor, text_BLE: Tensor, text_mask_BL: Tensor, part: TokenShard, before: Before = nothing_before
    ) -> Tensor:
        q_BTSE = region(self, "norm", self.q, x_BTSE, before=before)
        shape = q_BTSE.shape[1:3]
        q_BAND = q_BTSE.flatten(1, 2).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        kv = self.kv(text_BLE).unflatten(-1, (-1, 2, self.head_width))  # B L A 2 D
        k_BALD, v_BALD = kv.permute(3, 0, 2, 1, 4).unbind(0)
        out_BAND = part.attend_text(self.attend, self.q_norm(q_BAND), self.k_norm(k_BALD), v_BALD, text_mask_BL)
        return self.out(out_BAND.transpose(1, 2).flatten(2).unflatten(1, shape))
