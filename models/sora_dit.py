"""SoraDiT: a video diffusion transformer, factorised or with full attention.

After DiT (Peebles & Xie 2023: adaLN-Zero, every block the identity at the start), Latte and Open-Sora (spatial and
temporal blocks in turn), Cosmos (a low-rank part of the modulation per block on top of a shared one), and PixArt-alpha
(cross-attention to the caption).

Legend: B batch, C T h w channels, frames, height, width of a latent, N tokens, L caption tokens, D text width,
E model width, P values of a patch, X position axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mmspeed.compute.attention import attention
from mmspeed.compute.rope import grid_positions
from mmspeed.errors import UserError
from mmspeed.models.layers import (
    NORM_EPS,
    TIME_CHANNELS,
    Attend,
    CrossAttention,
    Mlp,
    SelfAttention,
    TimeEmbedder,
    initial_value,
    modulate,
    patchify,
    set_parameter,
    unpatchify,
)

Span = Literal["spatial", "temporal", "full"]

# Modules whose weights start at zero: the prediction, the modulation (so all gates), and what cross-attention adds.
ZERO_MODULES = ("final", "final_modulation", "modulation", "modulation_up", "cross_attention.out")


@dataclass(frozen=True)
class SoraDiTConfig:
    """All that the shape of a model depends on. Raises UserError for sizes that do not fit together."""

    width: int
    depth: int
    heads: int
    latent_channels: int
    text_width: int
    mlp_ratio: float = 4.0
    patch: tuple[int, int, int] = (1, 2, 2)
    adaln_rank: int = 256
    arrangement: Literal["factorised", "full"] = "factorised"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            near = [n for n in range(1, self.width // 12 + 1) if self.width % n == 0 and self.width // n % 2 == 0]
            hint = min(near, key=lambda n: abs(n - self.heads), default=None)
            raise UserError(
                f"model.width {self.width} is not divisible by model.heads {self.heads}"
                + (f"; the nearest number of heads that fits is {hint}" if hint else "; change one")
            )
        head_width = self.width // self.heads
        if head_width % 2 or head_width < 12:
            raise UserError(
                f"model.width {self.width} / model.heads {self.heads} gives heads of width {head_width}: "
                "it must be even and at least 12; change one"
            )
        if self.arrangement not in ("factorised", "full"):
            raise UserError(f"model.arrangement {self.arrangement!r} is not one of factorised, full")
        if min(self.patch) < 1 or self.hidden < 1:
            raise UserError(f"model.patch {self.patch} and model.mlp_ratio {self.mlp_ratio} must be positive")

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def patch_values(self) -> int:
        """Numbers that make one token."""
        return self.latent_channels * math.prod(self.patch)

    def span(self, block: int) -> Span:
        """What block number `block` attends over: within frames, within positions, or all."""
        if self.arrangement == "full":
            return "full"
        return "temporal" if block % 2 else "spatial"

    def grid(self, latent: tuple[int, int, int]) -> tuple[int, int, int]:
        """Patches along (T, h, w). Raises ValueError when the latent does not divide."""
        for label, size, step in zip(("frames", "height", "width"), latent, self.patch, strict=True):
            if size < 1 or size % step:
                raise ValueError(
                    f"latent {label} {size} of {latent} is no multiple of {step} of the model's patch {self.patch}"
                )
        t, h, w = (size // step for size, step in zip(latent, self.patch, strict=True))
        return t, h, w


class SoraBlock(nn.Module):
    """Self-attention over its span, cross-attention to the caption, MLP; each adds zero at the start."""

    def __init__(self, config: SoraDiTConfig, span: Span, attend: Attend) -> None:
        super().__init__()
        width = config.width
        self.span = span
        self.norm_self = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.self_attention = SelfAttention(width, config.heads, attend)
        self.norm_cross = nn.LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = CrossAttention(width, config.heads, attend)
        self.norm_mlp = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.mlp = Mlp(width, config.hidden, width)
        self.modulation_down = nn.Linear(width, config.adaln_rank, bias=False)
        self.modulation_up = nn.Linear(config.adaln_rank, 6 * width)

    def forward(
        self,
        x_BNE: Tensor,
        cond_BE: Tensor,
        shared_B6E: Tensor,
        text_BLE: Tensor,
        text_mask_BL: Tensor,
        pos_NX: Tensor,
        frames: int,
    ) -> Tensor:
        """`pos_NX` are the integer positions (t, h, w) of the tokens; `frames` is the number of patches along T."""
        own_B6E = self.modulation_up(self.modulation_down(cond_BE)).view_as(shared_B6E)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (shared_B6E + own_B6E).unbind(1)  # each BE
        h_BNE = modulate(self.norm_self(x_BNE), shift_a, scale_a)
        x_BNE = x_BNE + gate_a[:, None] * self._attend_span(h_BNE, pos_NX, frames)
        x_BNE = x_BNE + self.cross_attention(self.norm_cross(x_BNE), text_BLE, text_mask_BL)
        h_BNE = modulate(self.norm_mlp(x_BNE), shift_m, scale_m)
        return x_BNE + gate_m[:, None] * self.mlp(h_BNE)

    def _attend_span(self, h_BNE: Tensor, pos_NX: Tensor, frames: int) -> Tensor:
        """Rotary positions are relative, so axes along which a span does not vary are left out of its head width."""
        area = h_BNE.shape[1] // frames
        if self.span == "spatial":
            return self.self_attention(h_BNE, pos_NX[:area, 1:], frames, False)
        if self.span == "temporal":
            return self.self_attention(h_BNE, pos_NX[::area, :1], area, True)
        return self.self_attention(h_BNE, pos_NX, 1, False)


class SoraDiT(nn.Module):
    """The diffusion transformer; satisfies `mmspeed.protocol.DiffusionModel`.

    It is made with the weights of seed 0, except on the meta device: there call `to_empty` and `init_weights` later.
    `attend` is what all its attention goes through.
    """

    def __init__(self, config: SoraDiTConfig, attend: Attend = attention) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.patch_in = nn.Linear(config.patch_values, width)
        self.time = TimeEmbedder(width)
        self.modulation = nn.Linear(width, 6 * width)
        self.text_norm = nn.LayerNorm(config.text_width, eps=NORM_EPS)
        self.text_in = Mlp(config.text_width, width, width)
        self.blocks = nn.ModuleList(SoraBlock(config, config.span(i), attend) for i in range(config.depth))
        self.final_norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.final = nn.Linear(width, config.patch_values)
        if not self.patch_in.weight.is_meta:
            self.init_weights(0)

    def forward(self, x_BCThw: Tensor, t_B: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        """The prediction, of the shape and dtype of `x_BCThw`.

        `t_B` in [0, 1] should come as float32 (bfloat16 holds no more than 8 bits of it); `text_mask_BL` is bool, True
        at real tokens. Raises ValueError when the latent has not the model's channels or does not divide into patches.
        """
        if x_BCThw.shape[1] != self.config.latent_channels:
            raise ValueError(f"the latent has {x_BCThw.shape[1]} channels, the model {self.config.latent_channels}")
        _, _, frames, height, width = x_BCThw.shape
        grid = self.config.grid((frames, height, width))
        pos_NX = grid_positions(grid, x_BCThw.device)
        dtype = self.patch_in.weight.dtype  # of the computation, under sharded mixed precision too
        cond_BE = self.time(t_B)
        shared_B6E = self.modulation(cond_BE).unflatten(-1, (6, -1))
        text_BLE = self.text_in(self.text_norm(text_BLD.to(dtype)))
        x_BNE = self.patch_in(patchify(x_BCThw.to(dtype), self.config.patch))
        for block in self.blocks:
            x_BNE = block(x_BNE, cond_BE, shared_B6E, text_BLE, text_mask_BL, pos_NX, grid[0])
        shift_BE, scale_BE = self.final_modulation(cond_BE).chunk(2, dim=-1)
        out_BNP = self.final(modulate(self.final_norm(x_BNE), shift_BE, scale_BE))
        return unpatchify(out_BNP, self.config.patch, grid).to(x_BCThw.dtype)

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w). Raises ValueError when it does not divide into patches."""
        return math.prod(self.config.grid(latent))

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """FLOPs of the forward pass of one sample: its matrix products, a multiply-add as two. Raises as `tokens`."""
        return forward_flops(self.config, latent, text_tokens)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter from a generator keyed by its name: the same on any device, in any sharding (law 1).

        Works on parameters of any dtype, after `to_empty`, and on parameters sharded by `fully_shard`.
        """
        for name, parameter in self.named_parameters():
            module = name.rpartition(".")[0]
            zero = any(module == part or module.endswith(f".{part}") for part in ZERO_MODULES)
            set_parameter(parameter, initial_value(name, parameter.shape, seed, zero))


def forward_flops(config: SoraDiTConfig, latent: tuple[int, int, int], text_tokens: int) -> int:
    """FLOPs of the matrix products of one sample's forward pass; biases, norms and activations are not counted."""
    t, h, w = config.grid(latent)
    n, e, rank, text = t * h * w, config.width, config.adaln_rank, text_tokens
    keys = {"spatial": h * w, "temporal": t, "full": n}
    per_block = (
        4 * n * e * e  # self-attention: q k v, out
        + 2 * n * e * e  # cross-attention: q, out
        + 2 * text * e * e  # cross-attention: k v
        + 2 * n * text * e  # cross-attention: scores, values
        + 2 * n * e * config.hidden  # MLP
        + 7 * e * rank  # modulation
    )
    spans = sum(2 * n * keys[config.span(block)] * e for block in range(config.depth))  # self-attention: scores, values
    ends = (
        2 * n * config.patch_values * e  # patches in and out
        + TIME_CHANNELS * e + e * e + 6 * e * e + 2 * e * e  # timestep, shared and final modulation
        + text * (config.text_width * e + e * e)  # caption projection
    )  # fmt: skip
    return 2 * (config.depth * per_block + spans + ends)


def count_parameters(model: nn.Module) -> int:
    """Numbers in all parameters; needs no memory for a model on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(config: SoraDiTConfig) -> SoraDiT:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return SoraDiT(config)
