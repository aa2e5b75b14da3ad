"""SoraDiT: a video diffusion transformer, factorised or with full attention.

After DiT (Peebles & Xie 2023: adaLN-Zero, every block the identity at the start), Latte and Open-Sora (spatial and
temporal blocks in turn), Cosmos (a low-rank part of the modulation per block on top of a shared one), and PixArt-alpha
(cross-attention to the caption).

Legend: B batch, C T h w channels, frames, height, width of a latent, T S rows and columns of tokens (frames x places of a
frame, or one row of all), L caption tokens, D text width, E model width, P values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from mmspeed.compute.rope import grid_positions
from mmspeed.compute.sparse.cluster_plan import usual_tail_clusters
from mmspeed.compute.sparse.dispatch import check_backend
from mmspeed.compute.sparse.module import ClusteredAttention, clustered_layers
from mmspeed.compute.structured import Attend
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights, initial_value
from mmspeed.models.sora.layers import (
    NORM_EPS,
    TIME_CHANNELS,
    AttentionType,
    CrossAttention,
    FinalLinear,
    Mlp,
    SelfAttention,
    TextMlp,
    TimeEmbedder,
    of_tokens,
    patchify,
    position_turns,
    unpatchify,
)
from mmspeed.models.sora.sora_plan import sora_plan
from mmspeed.protocols import Work
from mmspeed.protocols.plan import ModelPlan, Structure, declare_plan

ELEMENTWISE = 60  # operations per token and channel of a block: three norms, modulation, rotary positions, GELU, gates
# modules whose weights start at zero: the prediction, the modulation (so all gates), the output of cross-attention, the control
ZERO_MODULES = ("final", "final_modulation", "modulation", "modulation_up", "cross_attention.out", "control_in")


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
    sparse: SparseConfig | None = None
    control: bool = False

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
        if self.sparse is not None:
            check_backend(self.sparse.backend, "model.sparse.backend")
        if self.sparse is not None and not self.sparse_blocks:
            raise UserError(
                f"model.sparse: none of the {self.depth} blocks is sparse: lower dense_first, dense_last, or change spans"
            )

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def patch_values(self) -> int:
        """The number of values in one token."""
        return self.latent_channels * math.prod(self.patch)

    def span(self, block: int) -> AttentionType:
        """The span of block number `block`'s attention: within frames, within positions, or all."""
        if self.arrangement == "full":
            return "full"
        return "temporal" if block % 2 else "spatial"

    def is_sparse(self, block: int) -> bool:
        """True where the self-attention of block number `block` is sparse, for videos that are long enough."""
        sparse = self.sparse
        if sparse is None or not sparse.dense_first <= block < self.depth - sparse.dense_last:
            return False
        return self.arrangement == "full" or sparse.spans in ("all", self.span(block))

    def way(self, block: int) -> Literal[0, 1]:
        """The way of block number `block` in a pattern that alternates between the blocks of a span."""
        return 1 if (block if self.arrangement == "full" else block // 2) % 2 else 0

    @property
    def sparse_blocks(self) -> list[int]:
        """Numbers of the blocks that `is_sparse` names."""
        return [block for block in range(self.depth) if self.is_sparse(block)]

    def attended(self, block: int, grid: tuple[int, int, int]) -> int:
        """The number of tokens in a sequence that block number `block` attends over, for a grid of patches (T, h, w)."""
        t, h, w = grid
        return {"spatial": h * w, "temporal": t, "full": t * h * w}[self.span(block)]

    def expected_share(self, block: int, grid: tuple[int, int, int]) -> float:
        """The approximate share of its self-attention's pairs that block number `block` computes, without dense warm-up."""
        sparse, keys = self.sparse, self.attended(block, grid)
        if sparse is None or not self.is_sparse(block) or grid[0] == 1 or keys < sparse.min_tokens:
            return 1.0
        kept, means = sparse.keep, sparse.tail_clusters or usual_tail_clusters(keys)
        if sparse.grouping == "skip":
            kept = 1 / sparse.stride
        elif sparse.grouping == "window":
            axes = {"spatial": (1, 2), "temporal": (0,), "full": (0, 1, 2)}[self.span(block)]
            kept = min(1.0, math.prod(sparse.window[axis] * sparse.tile[axis] for axis in axes) / keys)
        return min(1.0, kept + (means / keys if sparse.tail == "summary" else 0.0))

    def rows_and_columns(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """The shape of the tokens in blocks: frames x places of a frame; one row of all where every block attends over all."""
        t, h, w = grid
        return (1, t * h * w) if self.arrangement == "full" else (t, h * w)

    def grid(self, latent: tuple[int, int, int]) -> tuple[int, int, int]:
        """Patches along (T, h, w). Raises ValueError when the latent does not divide."""
        for label, size, step in zip(("frames", "height", "width"), latent, self.patch, strict=True):
            if size < 1 or size % step:
                raise ValueError(
                    f"latent {label} {size} of {latent} is no multiple of {step} of the model's patch {self.patch}"
                )
        t, h, w = (size // step for size, step in zip(latent, self.patch, strict=True))
        return t, h, w


class SparseAttend(ClusteredAttention):
    """Sparse self-attention of a block; dense for an image."""

    def forward(self, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, structure: Structure) -> Tensor:  # type: ignore[override]
        if q_BAND.dim() == 5:  # columns that attend apart: plans are of (B, A, N, D)
            q, k, v = (x.flatten(0, 1) for x in (q_BAND, k_BAND, v_BAND))
            return self.forward(q, k, v, structure).unflatten(0, q_BAND.shape[:2])
        if structure.image or structure.positions_NX is None:
            return self.dense(q_BAND, k_BAND, v_BAND, structure.key_mask_BN)
        return self.attend(q_BAND, k_BAND, v_BAND, structure.key_mask_BN, structure.positions_NX.long())


class SoraBlock(nn.Module):
    """Self-attention along its dim, cross-attention to the caption, MLP; each adds zero at the start."""

    def __init__(self, config: SoraDiTConfig, place: int) -> None:
        super().__init__()
        width, along = config.width, config.span(place)
        self.along = along
        attend: nn.Module = Attend()
        if config.is_sparse(place):
            assert config.sparse is not None
            attend = SparseAttend(config.sparse, way=config.way(place), frames=along != "spatial")
        self.self_attention = SelfAttention(width, config.heads, along, attend)
        self.norm_cross = nn.LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = CrossAttention(width, config.heads)
        self.mlp = Mlp(width, config.hidden)
        self.modulation_down = nn.Linear(width, config.adaln_rank, bias=False)
        self.modulation_up = nn.Linear(config.adaln_rank, 6 * width)

    def forward(
        self,
        x_BTSE: Tensor,
        cond: Tensor,
        shared: Tensor,
        text_BLE: Tensor,
        text_mask_BL: Tensor,
        frame_TS: Tensor,
        pos_T1X: Tensor,
        pos_1SX: Tensor,
        turn_2T1H: Tensor | None,
        turn_21SH: Tensor | None,
        mask_BTS: Tensor | None,
        image: bool,
    ) -> Tensor:
        """The tokens after the block; `cond` (..., E) and `shared` (..., 6, E) are of samples (B) or of frames (B, F)."""
        own = self.modulation_up(self.modulation_down(cond)).view_as(shared)
        # each (B, 1, 1, E) or (B, T, 1 or S, E)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (of_tokens(m, frame_TS) for m in (shared + own).unbind(-2))
        if self.along == "temporal":
            assert turn_2T1H is not None
            pos_NX, turn_2NH = pos_T1X[:, 0], turn_2T1H[:, :, 0]
        else:
            assert turn_21SH is not None
            pos_NX, turn_2NH = pos_1SX[0], turn_21SH[:, 0]
        x_BTSE = self.self_attention(x_BTSE, shift_a, scale_a, gate_a, pos_NX, turn_2NH, mask_BTS, image)
        norm = self.norm_cross
        x_BTSE = self.cross_attention(x_BTSE, norm.weight, norm.bias, text_BLE, text_mask_BL)
        return self.mlp(x_BTSE, shift_m, scale_m, gate_m)


class SoraDiT(nn.Module):
    """The diffusion transformer; it satisfies `mmspeed.protocols.DiffusionModel`. Its plan is `mmspeed.models.sora.sora_plan`.

    It starts with the weights of seed 0, except on the meta device: there call `to_empty` and `mmspeed.initialize.init_weights` later.
    """

    plan: ModelPlan

    def __init__(self, config: SoraDiTConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.patch_in = nn.Linear(config.patch_values, width)
        if (
            config.control
        ):  # the embedding's further channels, apart so that the latents' product is the same without them
            self.control_in = nn.Linear(config.patch_values, width, bias=False)
        self.time = TimeEmbedder(width)
        self.modulation = nn.Linear(width, 6 * width)
        self.text_norm = nn.LayerNorm(config.text_width, eps=NORM_EPS)
        self.text_in = TextMlp(config.text_width, width)
        self.blocks = nn.ModuleList(SoraBlock(config, i) for i in range(config.depth))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.final = FinalLinear(width, config.patch_values)
        declare_plan(self, sora_plan([config.span(i) for i in range(config.depth)], config.heads, config.control))
        if not self.patch_in.weight.is_meta:
            init_weights(self, 0)

    def forward(
        self,
        x_BCThw: Tensor,
        t: Tensor,
        text_BLD: Tensor,
        text_mask_BL: Tensor,
        video_mask_BThw: Tensor | None = None,
        control_BCThw: Tensor | None = None,
    ) -> Tensor:
        """The prediction, of the shape and dtype of `x_BCThw`.

        Args:
            t: in [0, 1], of samples (B,) or of latent frames (B, T): 0 at frames that are given, such as the first one of a
                video made from an image (see `conditioning` in the config). It should come as float32
                (bfloat16 holds no more than 8 bits of it).
            text_mask_BL: bool, True at real tokens.
            video_mask_BThw: bool, True at real latents, False at padding: no token attends to a patch without a real latent.
                None: all are real. Internal: no pipeline reaches it yet.
            control_BCThw: the latent of the control video, of a model that takes one.

        Raises ValueError when the latent has another number of channels than the model or does not divide into patches, when a mask, the
        control or the times have another shape, and for a control that is missing or that the model does not take.
        """
        config = self.config
        if x_BCThw.shape[1] != config.latent_channels:
            raise ValueError(f"the latent has {x_BCThw.shape[1]} channels, the model {config.latent_channels}")
        given, taken = (
            None if x is None else tuple(x.shape) for x in (control_BCThw, x_BCThw if config.control else None)
        )
        if given != taken:
            raise ValueError(f"the control latent has the shape {given}, the model takes {taken}")
        _, _, frames, height, width = x_BCThw.shape
        grid = config.grid((frames, height, width))
        shape = config.rows_and_columns(grid)
        pos_TSX = grid_positions(grid, x_BCThw.device).unflatten(0, shape)
        frame_TS = pos_TSX[..., 0] if config.arrangement == "full" else pos_TSX[:, :1, 0]
        mask_BTS = self._token_mask(video_mask_BThw, x_BCThw, shape)
        dtype = self.patch_in.weight.dtype  # of the computation, under sharded mixed precision too
        cond = self.time(self._checked_times(t, x_BCThw))  # (B, E) or (B, F, E)
        shared = self.modulation(cond).unflatten(-1, (6, -1))
        text_BLE = self.text_in(self.text_norm(text_BLD.to(dtype)))
        x_BTSE = self.patch_in(patchify(x_BCThw.to(dtype), config.patch).unflatten(1, shape))
        if control_BCThw is not None:
            x_BTSE = x_BTSE + self.control_in(patchify(control_BCThw.to(dtype), config.patch).unflatten(1, shape))
        pos_T1X, pos_1SX = pos_TSX[:, :1], pos_TSX[:1]
        turn_2T1H, turn_21SH = self._turns(pos_T1X, pos_1SX, x_BTSE.dtype)
        common = text_BLE, text_mask_BL, frame_TS, pos_T1X, pos_1SX, turn_2T1H, turn_21SH, mask_BTS, frames == 1
        for block in self.blocks:
            x_BTSE = block(x_BTSE, cond, shared, *common)
        shift, scale = self.final_modulation(cond).chunk(2, dim=-1)
        out_BTSP = self.final(x_BTSE, shift, scale, frame_TS)
        return unpatchify(out_BTSP.flatten(1, 2), config.patch, grid).to(x_BCThw.dtype)

    def _turns(self, pos_T1X: Tensor, pos_1SX: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines of the rotary positions of all blocks: along rows, and along columns; None where no block attends so."""
        tables: list[Tensor | None] = [None, None]
        for span in {self.config.span(place) for place in range(self.config.depth)}:
            pos_TSX = pos_T1X if span == "temporal" else pos_1SX
            turn_2NH = position_turns(pos_TSX.flatten(0, 1), span, self.head_width, dtype)
            tables[span != "temporal"] = turn_2NH.unflatten(1, pos_TSX.shape[:2])
        return tables[0], tables[1]

    def _checked_times(self, t: Tensor, x_BCThw: Tensor) -> Tensor:
        """The times, checked to be of samples (B,) or of latent frames (B, T), which a patch of several frames would mix."""
        if t.dim() == 1:
            return t
        wanted = (x_BCThw.shape[0], x_BCThw.shape[2])
        if tuple(t.shape) != wanted or self.config.patch[0] != 1:
            raise ValueError(
                f"times of frames have the shape {wanted}, not {tuple(t.shape)}, and need patches of one frame"
            )
        return t

    def _token_mask(self, mask_BThw: Tensor | None, x_BCThw: Tensor, shape: tuple[int, int]) -> Tensor | None:
        """True at the tokens (B, T, S) with a real latent."""
        if mask_BThw is None:
            return None
        wanted = (x_BCThw.shape[0], *x_BCThw.shape[2:])
        if mask_BThw.dtype != torch.bool or tuple(mask_BThw.shape) != wanted:
            raise ValueError(
                f"the video mask is bool of the shape {wanted}, not {mask_BThw.dtype} {tuple(mask_BThw.shape)}"
            )
        return patchify(mask_BThw[:, None], self.config.patch).any(-1).unflatten(1, shape)

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.config.width // self.config.heads

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w). Raises ValueError when it does not divide into patches."""
        return math.prod(self.config.grid(latent))

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """FLOPs of the forward pass of one sample: its matrix products, a multiply-add as two. Raises as `tokens`.

        Sparse attention counts by the share of pairs that its config keeps, without planning.
        """
        return forward_flops(self.config, latent, text_tokens)

    def dense_flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """FLOPs of the forward pass of one sample if all attention were dense."""
        return forward_flops(replace(self.config, sparse=None), latent, text_tokens)

    def work(self, latent: tuple[int, int, int], text_tokens: int) -> Work:
        """Work of the forward pass of one sample by kind, if all attention were dense. Raises as `tokens`."""
        return forward_work(replace(self.config, sparse=None), latent, text_tokens)

    @property
    def begins_at_zero(self) -> tuple[str, ...]:
        """Names of parameters of a further input, which a run that this model starts from may lack."""
        return ("control_in.weight",) if self.config.control else ()

    def initial_weights(self, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with the whole float32 value on the CPU that it starts from, then reset the sparse layers.

        A value is drawn from a generator keyed by its parameter's name: the same on any device, in any sharding (law 1).
        """
        for name, parameter in self.named_parameters():
            module = name.rpartition(".")[0]
            zero = any(module == part or module.endswith(f".{part}") for part in ZERO_MODULES)
            yield parameter, initial_value(name, parameter.shape, seed, zero)
        for layer in clustered_layers(self).values():
            layer.reset()


def forward_flops(config: SoraDiTConfig, latent: tuple[int, int, int], text_tokens: int) -> int:
    """FLOPs of the matrix products of one sample's forward pass; biases, norms and activations are not counted."""
    return int(forward_work(config, latent, text_tokens).matmul)


def forward_work(config: SoraDiTConfig, latent: tuple[int, int, int], text_tokens: int) -> Work:
    """Work of one sample's forward pass by kind; element-wise work is about 60 operations per token and channel of a block."""
    grid = config.grid(latent)
    n, e, rank, text = math.prod(grid), config.width, config.adaln_rank, text_tokens
    per_block = (
        4 * n * e * e  # self-attention: q k v, out
        + 2 * n * e * e  # cross-attention: q, out
        + 2 * text * e * e  # cross-attention: k v
        + 2 * n * e * config.hidden  # MLP
        + 7 * e * rank  # modulation
    )
    scores = config.depth * 2 * n * text * e + sum(  # scores and values of cross-attention and self-attention
        int(2 * n * config.attended(block, grid) * e * config.expected_share(block, grid))
        for block in range(config.depth)
    )
    ends = (
        (3 if config.control else 2) * n * config.patch_values * e  # patches in and out
        + TIME_CHANNELS * e + e * e + 6 * e * e + 2 * e * e  # timestep, shared and final modulation
        + text * (config.text_width * e + e * e)  # caption projection
    )  # fmt: skip
    elementwise = ELEMENTWISE * config.depth * n * e
    return Work(float(2 * (config.depth * per_block + ends)), float(2 * scores), float(elementwise))


def count_parameters(model: nn.Module) -> int:
    """The number of elements in all parameters; needs no memory for a model on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(config: SoraDiTConfig) -> SoraDiT:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return SoraDiT(config)
