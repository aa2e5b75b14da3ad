"""Parts that diffusion transformers are made of.

Legend: B batch (samples; sample x group inside an attention), N tokens, M keys, L caption tokens, A heads, D head
width, E model width, C T h w channels, frames, height, width of a latent, P values of a patch, X position axes,
G groups that attend apart, S tokens of a group, H half of D.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mmspeed.compute.rope import apply_rope, rope_cos_sin
from mmspeed.rng import generator

# (q_BAND, k_BAMD, v_BAMD, key_mask_BM) -> out_BAND: `compute.attention.attention`, or what a parallel layer puts there
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

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


def timestep_embedding(t_B: Tensor, channels: int = TIME_CHANNELS) -> Tensor:
    """Sinusoidal embedding (B, channels) of 1000 t in float32, as in DDPM and DiT."""
    half = channels // 2
    steps = torch.arange(half, device=t_B.device, dtype=torch.float32) / half
    angle = 1000.0 * t_B.float()[:, None] * torch.exp(-math.log(10_000.0) * steps)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def modulate(x_BNE: Tensor, shift_BE: Tensor, scale_BE: Tensor) -> Tensor:
    """x (1 + scale) + shift, the same for all tokens of a sample."""
    return x_BNE * (1 + scale_BE[:, None]) + shift_BE[:, None]


class Mlp(nn.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width_in, hidden)
        self.down = nn.Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class TimeEmbedder(nn.Module):
    """The conditioning vector of a timestep: sinusoids, then linear, SiLU, linear, SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(TIME_CHANNELS, width)
        self.out = nn.Linear(width, width)

    def forward(self, t_B: Tensor) -> Tensor:
        sinusoids = timestep_embedding(t_B).to(self.up.weight.dtype)
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
    """Self-attention with QK-norm and rotary positions inside groups of tokens.

    The fused projection is laid out head by head (head, q/k/v, D), so that splitting its rows splits heads.
    """

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = HeadNorm(width // heads)
        self.k_norm = HeadNorm(width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x_BNE: Tensor, pos_SX: Tensor, groups: int, strided: bool) -> Tensor:
        """`groups` G sets of S = N/G tokens attend apart; token n is in group n // S, or n % G when `strided`.

        `pos_SX` are the integer positions inside a group (the same for all of them).
        """
        batch, tokens, _ = x_BNE.shape
        inner = (tokens // groups, groups) if strided else (groups, tokens // groups)
        qkv = self.qkv(x_BNE).view(batch, *inner, self.heads, 3, -1)
        order = (4, 0, 2, 3, 1, 5) if strided else (4, 0, 1, 3, 2, 5)
        q_BAND, k_BAND, v_BAND = qkv.permute(order).flatten(1, 2).unbind(0)  # B is batch x G, N is S
        cos_NH, sin_NH = rope_cos_sin(pos_SX, q_BAND.shape[-1])
        q_BAND = apply_rope(self.q_norm(q_BAND), cos_NH, sin_NH)
        k_BAND = apply_rope(self.k_norm(k_BAND), cos_NH, sin_NH)
        out = self.attend(q_BAND, k_BAND, v_BAND, None).unflatten(0, (batch, groups))  # B G A S D
        out = out.permute(0, 3, 1, 2, 4) if strided else out.permute(0, 1, 3, 2, 4)  # back to the order of the tokens
        return self.out(out.reshape(x_BNE.shape))


class CrossAttention(nn.Module):
    """Attention from tokens to the caption, with QK-norm and no positions (the text encoder gave them)."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.q_norm = HeadNorm(width // heads)
        self.k_norm = HeadNorm(width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x_BNE: Tensor, text_BLE: Tensor, text_mask_BL: Tensor) -> Tensor:
        q_BAND = self.q(x_BNE).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(text_BLE).unflatten(-1, (self.heads, 2, -1))  # B L A 2 D
        k_BAMD, v_BAMD = kv.permute(3, 0, 2, 1, 4).unbind(0)
        out_BAND = self.attend(self.q_norm(q_BAND), self.k_norm(k_BAMD), v_BAMD, text_mask_BL)
        return self.out(out_BAND.transpose(1, 2).flatten(2))


def initial_value(name: str, shape: torch.Size, seed: int, zero: bool) -> Tensor:
    """The float32 value on the CPU that a parameter starts from; a pure function of its name, shape and the seed.

    Matrices are Xavier-uniform (Glorot & Bengio 2010), or zero where `zero`; norm scales are one, biases zero.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") and not zero else torch.zeros(shape)
    if zero:
        return torch.zeros(shape)
    bound = math.sqrt(6.0 / (shape[0] + shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator(seed, "init", name))


@torch.no_grad()
def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a whole value into a parameter; a sharded parameter takes its own part, without communication."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
