"""Sparse attention by CUDA's flash operator for sequences of any lengths, over gathered keys: no kernel of our own.

Its backward sums the queries' gradients in any order unless torch's deterministic mode is on; keys' gradients are summed in a fixed order.

Legend: in a batch T queries, S gathered keys, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspeed.compute.block_kernels import HALF
from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan
from mmspeed.torch_internals import varlen_flash, varlen_flash_backward

from .packed import PackedBatch, packed_kernel


def _refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    if q.device.type != "cuda":
        return f"tensors on {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "devices before compute capability 8.0"
    return width_refused(q, v)


def width_refused(q: Tensor, v: Tensor) -> str:
    """The types and widths that the operator does not support; empty where it does."""
    width = q.shape[-1]
    fits = q.dtype in HALF and width % 8 == 0 and width <= 256 and v.shape[-1] == width
    return "" if fits else f"{q.dtype} heads of width {width} and values of width {v.shape[-1]}"


def _ends(ends: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32).to(like.device)


def varlen_forward(
    q_T1D: Tensor, k_S1D: Tensor, v_S1D: Tensor, batch: PackedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, (out_T1D, lse_T)."""
    ends = _ends(batch.query_ends, q_T1D), _ends(batch.key_ends, q_T1D)
    most = batch.most_queries, batch.most_keys
    out_T1D, lse_1T = varlen_flash(q_T1D, k_S1D, v_S1D, *ends, *most, 0.0, False, False, scale=scale)[:2]
    return out_T1D, lse_1T[0]


def varlen_backward(
    dout_T1D: Tensor,
    q_T1D: Tensor,
    k_S1D: Tensor,
    v_S1D: Tensor,
    out_T1D: Tensor,
    lse_T: Tensor,
    batch: PackedBatch,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq_T1D, dk_S1D, dv_S1D)."""
    ends = _ends(batch.query_ends, q_T1D), _ends(batch.key_ends, q_T1D)
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=q_T1D.device) for size in (2, 0))  # no dropout
    inputs = (dout_T1D, q_T1D, k_S1D, v_S1D, out_T1D, lse_T[None].contiguous())
    most = batch.most_queries, batch.most_keys
    dq, dk, dv = varlen_flash_backward(*inputs, *ends, *most, 0.0, False, seed, unused, scale=scale)
    return dq, dk, dv


VARLEN = packed_kernel("varlen", _refuses, varlen_forward, varlen_backward)
