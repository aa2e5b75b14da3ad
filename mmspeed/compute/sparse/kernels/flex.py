"""Sparse attention for plans of tiles by torch's flex_attention: on CUDA, a compiled kernel over blocks of 128 queries by 128 keys.

Clusters of queries and tiles of keys are padded to whole blocks; a kept block without padding and without masked keys is full and runs
without a mask. Smaller blocks would waste less, but on some devices torch's backward supports blocks of 128 alone, so tiles should hold a
multiple of 128 tokens, or nearly. Means are a second part of the softmax, merged by its log-sum-exp, which is differentiable here. On CPU,
flex has no backward pass: it runs eagerly, without gradients, for tests.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, R tiles of keys; P and Q blocks of queries and
of keys, L = 128 P and S = 128 Q places in them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmspeed.compute.block_kernels import HALF
from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan, Tiles

from .kernel import SparseKernel, nobody
from .tail import coarse, merge_parts

BLOCK = 128


def _refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    kind = q.device.type
    if plan.tiles is None:
        return "a plan that is not made of tiles"
    if kind == "cpu":
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return "gradients on cpu" if trained else ""
    if kind != "cuda":
        return f"tensors on {kind}"
    if importlib.util.find_spec("triton") is None:
        return "a machine without triton"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "devices before compute capability 8.0"
    return "" if q.dtype in (*HALF, torch.float32) and q.shape[-1] >= 16 else f"{q.dtype} heads of width {q.shape[-1]}"


class PaddedRows(NamedTuple):
    """Rows padded to whole blocks."""

    row: Tensor  # int64, (G, L) or (1, S): the row at each place; any row at padding
    live: Tensor  # bool: a row, not padding
    part: Tensor  # int64, (G, P) or (1, Q): the cluster or tile of each block; the number of parts for surplus blocks
    place: Tensor  # int64, (G, N) or (1, M): the place of each sorted row


def filled(offsets: Tensor, index: Tensor) -> PaddedRows:
    """Parts of sorted rows, each padded to whole blocks. Copies a number to the host: the most blocks of a head.

    Args:
        offsets: (G, parts + 1), the start of each part.
        index: (G, rows), the sorted rows.
    """
    device, parts = offsets.device, offsets.shape[1] - 1
    blocks = (offsets.diff(dim=1) + (BLOCK - 1)) // BLOCK
    ends = blocks.cumsum(dim=1)
    count = max(1, int(ends[:, -1].max()))
    number = torch.arange(count, device=device).expand(len(offsets), -1).contiguous()
    part = torch.searchsorted(ends, number, right=True)
    known = part.clamp(max=parts - 1)
    first = offsets.gather(1, known) + (number - (ends - blocks).gather(1, known)) * BLOCK
    place = (first[..., None] + torch.arange(BLOCK, device=device)).flatten(1)
    last = offsets.gather(1, known + 1).masked_fill(part == parts, 0)
    live = place < last.repeat_interleave(BLOCK, dim=1)
    of_place = torch.where(live, place, index.shape[1])  # padding goes to an extra place
    where = torch.zeros(len(offsets), index.shape[1] + 1, dtype=torch.int64, device=device)
    where.scatter_(1, of_place, torch.arange(place.shape[1], device=device).expand_as(place))
    rows = index.gather(1, place.clamp(max=max(0, index.shape[1] - 1)))
    return PaddedRows(rows, live, part, where[:, :-1])


def seen_keys(plan: ClusterPlan) -> Tensor:
    """The keys that some cluster keeps, (G, M) bool. In a kept tile, the others are masked."""
    groups = plan.batch * plan.heads
    head_Z = torch.arange(groups, device=plan.kv_index_Z.device).repeat_interleave(
        plan.kv_offsets[:: plan.clusters].diff(), output_size=len(plan.kv_index_Z)
    )
    seen = torch.zeros(groups, plan.keys, dtype=torch.bool, device=head_Z.device)
    seen[head_Z, plan.kv_index_Z.long()] = True
    return seen


def block_mask(plan: ClusterPlan, tiles: Tiles, queries: PaddedRows, keys: PaddedRows) -> BlockMask:
    """The block mask: the blocks to compute, and those of them without a mask. Its `mask_mod` is right even if no block is left out."""
    shape = plan.batch, plan.heads
    groups = plan.batch * plan.heads
    counted_GS = seen_keys(plan).gather(1, keys.row.expand(groups, -1)) & keys.live
    none = torch.zeros_like(tiles.kept_GCR[:, :1])
    kept_GPR = torch.cat((tiles.kept_GCR, none), dim=1).gather(
        1, queries.part[..., None].expand(-1, -1, tiles.kept_GCR.shape[2])
    )
    kept_GPQ = torch.cat((kept_GPR, torch.zeros_like(kept_GPR[..., :1])), dim=2)[..., keys.part[0]]
    whole_G1Q = counted_GS.unflatten(1, (-1, BLOCK)).all(dim=2)[:, None]
    kept, counted = kept_GPQ.unflatten(0, shape), counted_GS.unflatten(0, shape)

    def mask_mod(b: Tensor, h: Tensor, at: Tensor, key: Tensor) -> Tensor:
        return counted[b, h, key] & kept[b, h, at // BLOCK, key // BLOCK]

    def listed(some_GPQ: Tensor) -> tuple[Tensor, Tensor]:
        order = some_GPQ.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return some_GPQ.sum(dim=-1, dtype=torch.int32).unflatten(0, shape), order.unflatten(0, shape)

    return BlockMask.from_kv_blocks(
        *listed(kept_GPQ & ~whole_G1Q),
        *listed(kept_GPQ & whole_G1Q),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(queries.row.shape[1], keys.row.shape[1]),
    )


def _rows(x_BAND: Tensor, index_GL: Tensor) -> Tensor:
    flat = x_BAND.flatten(0, 1)
    index = index_GL.expand(len(flat), -1)[..., None].expand(-1, -1, flat.shape[-1])
    return flat.gather(1, index).unflatten(0, x_BAND.shape[:2])


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _attend(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans | None,
    scale: float,
    ran: Callable[[], object] = nobody,
) -> tuple[Tensor, Tensor]:
    ran()
    assert plan.tiles is not None
    queries = filled(plan.q_offsets_GC, plan.q_index_GN)
    keys = filled(plan.tiles.key_offsets_R[None], plan.tiles.key_index_M[None])
    mask = block_mask(plan, plan.tiles, queries, keys)
    inputs = _rows(q_BAND, queries.row), _rows(k_BAMD, keys.row), _rows(v_BAMD, keys.row)
    attend = _compiled() if q_BAND.device.type == "cuda" else flex_attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about eager flex_attention being slow
        out_BALD, aux = attend(*inputs, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))
    place_GN = torch.empty_like(plan.q_index_GN).scatter_(1, plan.q_index_GN, queries.place)
    out_BAND, lse_BAN = _rows(out_BALD, place_GN), _rows(aux.lse[..., None], place_GN)[..., 0]
    if means is not None:
        merged, lse_BAN = merge_parts(out_BAND, lse_BAN, *coarse(q_BAND, plan, means, scale))
        out_BAND = merged.to(q_BAND.dtype)
    return out_BAND, lse_BAN.detach()


def _pairs(plan: ClusterPlan, tail: bool) -> Tensor:
    """Pairs that are computed: whole blocks, and every query with every mean."""
    assert plan.tiles is not None
    of_queries_GC = (plan.sizes() + (BLOCK - 1)) // BLOCK
    of_keys_R = (plan.tiles.key_offsets_R.diff() + (BLOCK - 1)) // BLOCK
    pairs = (of_queries_GC * (plan.tiles.kept_GCR * of_keys_R).sum(dim=-1)).sum() * BLOCK**2
    if tail and plan.tail is not None:
        pairs = pairs + plan.batch * plan.heads * plan.queries * plan.tail.clusters
    return pairs


FLEX = SparseKernel("flex", _refuses, _attend, _pairs)
