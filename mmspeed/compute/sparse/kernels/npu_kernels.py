"""Sparse attention by torch_npu's fused operators: any plan as packed sequences ("TND"), plans of whole tiles as a block mask.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, R tiles of keys; in a batch T queries, S
gathered keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspeed.compute.block_kernels import HALF
from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan, Tiles

from .kernel import Gradients, SparseKernel, explicit
from .packed import PackedBatch, packed_kernel
from .tail import with_means, with_means_backward

SEQUENCES = 2048  # the most of one call
KEY_BLOCK = 128  # the block operator's blocks of keys are a multiple of it


def _packed_refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    if not hasattr(torch.ops.npu, "npu_fusion_attention"):
        return "a machine without torch_npu"
    fits = q.dtype in (*HALF, torch.float32) and v.shape[-1] == q.shape[-1] <= 512
    return "" if fits else f"{q.dtype} heads of width {q.shape[-1]} and values of width {v.shape[-1]}"


def _packed_forward(
    q_T1D: Tensor, k_S1D: Tensor, v_S1D: Tensor, batch: PackedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    results = torch.ops.npu.npu_fusion_attention(
        q_T1D,
        k_S1D,
        v_S1D,
        1,
        "TND",
        scale=scale,
        actual_seq_qlen=batch.query_ends,
        actual_seq_kvlen=batch.key_ends,
    )
    top, total = (x[:, 0, 0].float() for x in results[1:3])  # row maxima and sums, each eight times over
    return results[0], top + total.log()


def _packed_backward(
    dout_T1D: Tensor,
    q_T1D: Tensor,
    k_S1D: Tensor,
    v_S1D: Tensor,
    out_T1D: Tensor,
    lse_T: Tensor,
    batch: PackedBatch,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    top_T18 = lse_T[:, None, None].expand(-1, 1, 8).contiguous()  # exp(score - max) / sum with max = lse and sum = 1
    dq, dk, dv = torch.ops.npu.npu_fusion_attention_grad(
        q_T1D,
        k_S1D,
        v_S1D,
        dout_T1D,
        1,
        "TND",
        softmax_max=top_T18,
        softmax_sum=torch.ones_like(top_T18),
        attention_in=out_T1D,
        scale_value=scale,
        actual_seq_qlen=batch.query_ends,
        actual_seq_kvlen=batch.key_ends,
    )[:3]
    return dq, dk, dv


def _block_refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    if not hasattr(torch.ops.npu, "npu_block_sparse_attention"):
        return "a machine whose torch_npu has no block sparse attention"
    if plan.tiles is None:
        return "a plan that is not made of tiles"
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    widths = (128,) if trained else (64, 128)  # its backward supports one width
    if q.dtype not in HALF or v.shape[-1] != q.shape[-1] or q.shape[-1] not in widths:
        return f"{q.dtype} heads of width {q.shape[-1]}" + (" in training" if trained else "")
    if block_shape(plan, plan.tiles) is None:
        return (
            f"tiles of several sizes, of keys that are no multiple of {KEY_BLOCK}, with masked keys or with none kept"
        )
    return ""


def block_shape(plan: ClusterPlan, tiles: Tiles) -> tuple[int, int] | None:
    """(queries, keys) of a block if all but the last have one size and are kept whole, and every query keeps a key; else None.

    Copies three numbers to the host.
    """
    columns = tiles.key_offsets_R.expand(1, -1)
    first_q, first_k = plan.q_offsets_GC[0, 1], tiles.key_offsets_R[1]
    even = (_even(plan.q_offsets_GC, plan.queries, first_q) & _even(columns, plan.keys, first_k)).all()
    kept = tiles.kept_GCR
    whole = ((kept * tiles.key_offsets_R.diff()).sum(dim=-1) == plan.lengths()).all() & kept.any(dim=-1).all()
    queries, keys, fits = torch.stack((first_q, first_k, (even & whole).long())).tolist()
    return (queries, keys) if fits and queries > 0 and keys > 0 and keys % KEY_BLOCK == 0 else None


def _even(offsets: Tensor, total: int, size: Tensor) -> Tensor:
    places = torch.arange(offsets.shape[1], device=offsets.device)
    return (offsets == (places * size).clamp(max=total)).all() & ((places[-2] * size) < total)


def _sorted(x_BAND: Tensor, index_GN: Tensor) -> Tensor:
    flat = x_BAND.flatten(0, 1)
    return flat.gather(1, index_GN[..., None].expand_as(flat)).unflatten(0, x_BAND.shape[:2])


def _restored(x_BAND: Tensor, index_GN: Tensor) -> Tensor:
    flat = x_BAND.flatten(0, 1)
    return torch.empty_like(flat).scatter_(1, index_GN[..., None].expand_as(flat), flat).unflatten(0, x_BAND.shape[:2])


def _blocks(plan: ClusterPlan) -> tuple[Tiles, Tensor, list[int], Tensor]:
    """The arguments of the block operator: (tiles, key order of each head, sizes of a block, kept blocks)."""
    assert plan.tiles is not None
    shape = block_shape(plan, plan.tiles)
    if shape is None:
        raise ValueError("the block kernel does not serve this plan")
    key_GM = plan.tiles.key_index_M.expand(plan.batch * plan.heads, -1)
    kept = plan.tiles.kept_GCR.to(torch.int8).unflatten(0, (plan.batch, plan.heads)).contiguous()
    return plan.tiles, key_GM, list(shape), kept


def _block_forward(
    q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
) -> tuple[Tensor, Tensor]:
    _, key_GM, shape, kept = _blocks(plan)
    out, lse = torch.ops.npu.npu_block_sparse_attention(
        _sorted(q_BAND, plan.q_index_GN),
        _sorted(k_BAMD, key_GM),
        _sorted(v_BAMD, key_GM),
        kept,
        shape,
        q_input_layout="BNSD",
        kv_input_layout="BNSD",
        num_key_value_heads=plan.heads,
        scale_value=scale,
        inner_precise=0,  # softmax in float32
        softmax_lse_flag=1,
    )
    out_BAND = _restored(out, plan.q_index_GN)
    lse_BAN = _restored(lse.float().reshape(*q_BAND.shape[:3], 1), plan.q_index_GN)[..., 0]
    return with_means(q_BAND, out_BAND, lse_BAN, plan, means, scale)


def _block_backward(
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
    _, key_GM, shape, kept = _blocks(plan)
    dout, q, out = (_sorted(x, plan.q_index_GN) for x in (dout_BAND, q_BAND, out_BAND))
    lse = _sorted(lse_BAN[..., None], plan.q_index_GN)
    inputs = (dout, q, _sorted(k_BAMD, key_GM), _sorted(v_BAMD, key_GM), out, lse, kept, shape, None, None)
    dq, dk, dv = torch.ops.npu.npu_block_sparse_attention_backward(*inputs, "BNSD", "BNSD", plan.heads, scale)
    dq_BAND = _restored(dq, plan.q_index_GN)
    dq_BAND, dmeans = with_means_backward(dq_BAND, dout_BAND, q_BAND, out_BAND, lse_BAN, plan, means, scale)
    return dq_BAND, _restored(dk, key_GM), _restored(dv, key_GM), dmeans


NPU_TND = packed_kernel("npu_tnd", _packed_refuses, _packed_forward, _packed_backward, SEQUENCES)
NPU_BLOCK = SparseKernel("npu_block", _block_refuses, explicit(_block_forward, _block_backward))
