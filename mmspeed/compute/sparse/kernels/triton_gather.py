"""Sparse attention by a gather kernel: keys and values are loaded row by row through the lists, so exactly the kept ones count.

Written in Triton for CUDA; runs on CPU tensors where Triton interprets (TRITON_INTERPRET=1), as in its tests.

Forward: one program for a block of the queries of one cluster; it goes through the cluster's list, then the means, in a running softmax
in float32. Backward: with the final output and log-sum-exp, as in FlashAttention-2 (Dao, 2023); triton_backward.py sums gradients of keys
in a fixed order without atomic additions. Nothing here waits for the device.

Expected speed: a block of b queries does 4 b D operations for each kept key and reads 4 D bytes for it (bfloat16): b operations a byte.
A row is 2 D >= 32 bytes, whole sectors, and the keys of one head (8 MB each of keys and values at 32 k tokens, D = 128) stay in the
second-level cache while the programs of that head run, which is why items are numbered head by head: at about 6 TB/s from there, b = 64
allows some 380 TFLOP/s, b = 128 twice that. Clusters of 256 queries and more therefore take blocks of 128. The sums of dk and dv are read
and written once for each cluster that keeps a key, 16 D bytes for 8 b D operations of a whole cluster of b, also within that cache.
To be tuned on a device: QUERY_BLOCKS, KEY_BLOCK, PROGRAMS, and warps and stages in `shape_for`.
`python -m tests.claims.attention --device cuda --backend triton` measures.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys, R ranges of keys, S shares.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan

from .kernel import Gradients, SparseKernel, explicit

QUERY_BLOCKS = (64, 128)  # queries of a program: the larger where clusters have at least twice as many
KEY_BLOCK = 64  # keys, or means, of a step
PROGRAMS = 1024  # least number for key and mean gradients: several for each of a device's 60 to 150 processors
WIDEST_ROW = 512  # bytes of a head's row
WIDE_MEMORY = 160 << 10  # bytes of fast memory that rows of more than half as many take
LOG2E = 1.4426950408889634


class LaunchShape(NamedTuple):
    """Constants of a launch: the width of a head, padded to a power of two, the number type of products, warps and stages."""

    width: int
    padded: int
    exact: str
    num_warps: int
    num_stages: int

    def launch(self, **more: Any) -> dict[str, Any]:
        """The constants as keywords of a kernel."""
        constants = {"D": self.width, "W": self.padded, "EXACT": self.exact}
        return constants | {"num_warps": self.num_warps, "num_stages": self.num_stages} | more


def query_block(plan: ClusterPlan) -> int:
    """Queries of a program."""
    return QUERY_BLOCKS[plan.queries >= 2 * QUERY_BLOCKS[1] * plan.clusters]


def shape_for(q_BAND: Tensor, block: int) -> LaunchShape:
    """The constants by the bytes of a row; float32 products are exact unless torch's matmul precision is lowered."""
    width = q_BAND.shape[-1]
    padded = max(16, 1 << (width - 1).bit_length())
    row = padded * q_BAND.element_size()
    loose = torch.get_float32_matmul_precision() != "highest"
    exact = "tf32" if loose or q_BAND.dtype != torch.float32 else "ieee"
    if q_BAND.device.type == "cpu" and q_BAND.dtype == torch.bfloat16:
        exact = "widen"
    large = block * row > 1 << 14 or q_BAND.dtype == torch.float32
    return LaunchShape(width, padded, exact, 8 if large else 4, 2 if row <= 256 else 1)


def key_launch(q_BAND: Tensor) -> dict[str, Any]:
    """Keywords of kernels whose programs hold a block of keys and two sums: half as many queries at a time where rows are wide."""
    row = q_BAND.shape[-1] * q_BAND.element_size()
    shape = shape_for(q_BAND, QUERY_BLOCKS[1])._replace(num_warps=8 if row > 64 else 4)
    return shape.launch(BLOCK_Q=QUERY_BLOCKS[0] if row <= 256 else QUERY_BLOCKS[0] // 2, BLOCK_K=KEY_BLOCK)


def _refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    kind = q.device.type
    if kind != "cuda" and not (kind == "cpu" and _interpreted()):
        return f"tensors on {kind}" + (" without Triton's interpreter" if kind == "cpu" else "")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{q.dtype}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] * q.element_size() > WIDEST_ROW:
        return f"{q.dtype} heads of width {q.shape[-1]} and values of width {v.shape[-1]}"
    if kind == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "devices before compute capability 8.0"
    if kind == "cuda" and q.shape[-1] * q.element_size() > WIDEST_ROW // 2:
        properties: Any = torch.cuda.get_device_properties(q.device)
        if properties.shared_memory_per_block_optin < WIDE_MEMORY:
            return f"{q.dtype} heads of width {q.shape[-1]} on this device"
    return "" if _installed() else "a machine without triton"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def items(plan: ClusterPlan, block: int) -> tuple[Tensor, Tensor]:
    """The (row, place) of each program, int32: its cluster, counted over all heads, and its first sorted query.

    Their number is the most that any plan of this size needs, so that nothing is copied to the host; surplus ones have the row G C.
    """
    blocks_Z = ((plan.sizes() + (block - 1)) // block).flatten()
    ends_Z = blocks_Z.cumsum(0)
    most = (plan.queries + min(plan.clusters, plan.queries) * (block - 1)) // block
    each = torch.arange(plan.batch * plan.heads * most, device=ends_Z.device)
    row = torch.searchsorted(ends_Z, each, right=True)
    known = row.clamp(max=len(ends_Z) - 1)
    starts_Z = plan.q_offsets_GC[:, :-1].flatten()
    place = starts_Z[known] + (each - (ends_Z - blocks_Z)[known]) * block
    return row.int(), place.int()


def ranges(plan: ClusterPlan, block: int) -> int:
    """R, the number of ranges of a head's keys: so many that an average list fills two blocks in each, or more for PROGRAMS programs."""
    groups, keys = plan.batch * plan.heads, plan.keys
    by_length = len(plan.kv_index_Z) // (groups * plan.clusters * 2 * block)
    return max(1, min(max(by_length, -(-PROGRAMS // groups)), -(-keys // block)))


def cuts(plan: ClusterPlan, count: int) -> Tensor:
    """The position in each list of kept keys where each range of its head begins, (G C, R + 1) int32. Ranges have about equal work."""
    from . import triton_backward as kernels

    groups, keys, device = plan.batch * plan.heads, plan.keys, plan.kv_index_Z.device
    all_rows = groups * plan.clusters
    _, q_offsets, *lists = _lists(plan)
    work_GM = torch.zeros(groups, keys, dtype=torch.int32, device=device)
    kernels.count_work[(all_rows,)](work_GM, q_offsets, *lists, keys, plan.clusters, BLOCK=512)
    done_GM = work_GM.cumsum(dim=1)
    shares_GR = done_GM[:, -1:] * torch.arange(1, count, device=device) // count
    inner_GR = torch.searchsorted(done_GM, shares_GR).add_(1).clamp_(max=keys)
    ends_G1 = torch.full((groups, 1), keys, device=device)
    bounds_GR = torch.cat((torch.zeros_like(ends_G1), inner_GR, ends_G1), dim=1).int()
    cuts = torch.empty(all_rows, count + 1, dtype=torch.int32, device=device)
    grid = (all_rows, -(-(count + 1) // 64))
    kernels.cut_lists[grid](cuts, bounds_GR, *lists, plan.clusters, count, keys.bit_length() + 1, BLOCK=64)
    return cuts


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if x.device.type == "cpu" else torch.accelerator.device_index(x.device.index)


def _lists(plan: ClusterPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return plan.q_index_GN.contiguous(), plan.q_offsets_GC.contiguous(), plan.kv_index_Z, plan.kv_offsets


def _tail(plan: ClusterPlan, means: ClusterMeans | None, q_BAND: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """(mean keys, mean values, dropped counts) and K; without a tail, the queries as placeholders, which are not read, and 0."""
    if means is None or plan.tail is None:
        return (q_BAND, q_BAND, q_BAND), 0
    parts = (means.k_BAKD, means.v_BAKD, plan.tail.dropped_GCK)
    return tuple(x.contiguous() for x in parts), plan.tail.clusters  # type: ignore[return-value]


def _forward(
    q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
) -> tuple[Tensor, Tensor]:
    from .triton_forward import forward

    q, k, v = _rows(q_BAND), _rows(k_BAMD), _rows(v_BAMD)
    out_BAND, lse_BAN = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    block = query_block(plan)
    row, place = items(plan, block)
    tail, count = _tail(plan, means, q)
    lists = _lists(plan)
    all_rows = plan.batch * plan.heads * plan.clusters
    if not len(row):
        return out_BAND, lse_BAN
    with _on(q):
        forward[(len(row),)](
            q, k, v, out_BAND, lse_BAN,
            _strides(q), _strides(k), _strides(v), _strides(out_BAND),
            *tail, row, place, *lists,
            plan.heads, plan.queries, plan.clusters, count, all_rows, scale * LOG2E,
            **shape_for(q, block).launch(BLOCK_Q=block, BLOCK_K=KEY_BLOCK, TAIL=count > 0),
        )  # fmt: skip
    return out_BAND, lse_BAN


def _backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans | None,
    scale: float,
) -> Gradients:
    from . import triton_backward as kernels

    q, k, v, dout = _rows(q_BAND), _rows(k_BAMD), _rows(v_BAMD), _rows(dout_BAND)
    dq, delta_BAN = torch.empty_like(q), torch.empty_like(lse_BAN)
    groups, clusters, block = plan.batch * plan.heads, plan.clusters, query_block(plan)
    row, place = items(plan, block)
    tail, count = _tail(plan, means, q)
    lists = _lists(plan)
    scales = (scale * LOG2E, scale)
    shape = shape_for(q, block)
    sums = [torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2)]
    dmeans = None
    with _on(q):
        if len(row):
            kernels.query_gradient[(len(row),)](
                q, k, v, out_BAND, dout, lse_BAN, delta_BAN, dq,
                *[_strides(x) for x in (q, k, v, out_BAND, dout, dq)],
                *tail, row, place, *lists,
                plan.heads, plan.queries, clusters, count, groups * clusters, *scales,
                **shape.launch(BLOCK_Q=block, BLOCK_K=KEY_BLOCK, TAIL=count > 0),
            )  # fmt: skip
        if len(plan.kv_index_Z):
            parts = ranges(plan, KEY_BLOCK)
            kernels.key_gradient[(parts, groups)](
                q, k, v, dout, lse_BAN, delta_BAN, *sums,
                *[_strides(x) for x in (q, k, v, dout)],
                *lists, cuts(plan, parts),
                plan.heads, plan.queries, plan.keys, clusters, parts, *scales,
                **key_launch(q),
            )  # fmt: skip
        if count:
            blocks = -(-count // KEY_BLOCK)
            shares = max(1, min(clusters, -(-PROGRAMS // (groups * blocks))))
            dk, dv = (torch.empty(shares, *k.shape[:2], count, k.shape[3], device=k.device) for _ in range(2))
            kernels.mean_gradient[(blocks, shares, groups)](
                q, *tail, dout, lse_BAN, delta_BAN, dk, dv,
                _strides(q), _strides(dout), *lists[:2],
                plan.heads, plan.queries, clusters, count, shares, *scales,
                **key_launch(q),
            )  # fmt: skip
            dmeans = ClusterMeans(dk.sum(dim=0).to(k.dtype), dv.sum(dim=0).to(k.dtype))
    return dq, sums[0].to(k.dtype), sums[1].to(v.dtype), dmeans


def _pairs(plan: ClusterPlan, tail: bool) -> Tensor:
    """Pairs that the forward pass computes: whole blocks of queries with whole blocks of keys."""
    block = query_block(plan)
    queries_GC = (plan.sizes() + (block - 1)) // block * block
    keys_GC = (plan.lengths() + (KEY_BLOCK - 1)) // KEY_BLOCK * KEY_BLOCK
    if tail and plan.tail is not None:
        keys_GC = keys_GC + -(-plan.tail.clusters // KEY_BLOCK) * KEY_BLOCK
    return (queries_GC * keys_GC).sum()


TRITON = SparseKernel("triton", _refuses, explicit(_forward, _backward), _pairs)
