"""Sparse attention by operators for packed sequences of any lengths: the keys of each cluster are gathered for them.

A cluster of queries with its kept keys is a sequence of one head. Keys are gathered in batches of a bounded size, since their total is
the number of kept keys of all clusters. Lengths are read on the host: one copy from the device in forward, one in backward.
A row of keys is written and read once for each cluster, so clusters should be large: on a device with 180 operations per byte moved, the
gathering costs 1.4 times the attention itself at 256 queries a cluster, 0.35 times at 1024.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries; in a batch T queries, S gathered keys, E
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan

from .kernel import Gradients, Refuses, SparseKernel, explicit
from .tail import with_means, with_means_backward

BATCH_BYTES = 1 << 28  # keys, or values, gathered at a time


@dataclass(frozen=True)
class PackedBatch:
    """Sequences for one call of an operator. Each has at least one query and one key."""

    query_T: Tensor  # int64: query + N x head
    key_S: Tensor  # int64: key + M x head
    query_ends: list[int]  # end of each sequence among the queries
    key_ends: list[int]
    most_queries: int  # of a sequence
    most_keys: int


# (q_T1D, k_S1D, v_S1D, batch, scale) -> out_T1D, lse_T
PackedForward = Callable[[Tensor, Tensor, Tensor, PackedBatch, float], tuple[Tensor, Tensor]]
# (dout_T1D, q_T1D, k_S1D, v_S1D, out_T1D, lse_T, batch, scale) -> dq_T1D, dk_S1D, dv_S1D
PackedBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, PackedBatch, float], tuple[Tensor, Tensor, Tensor]
]


def _spread(start_E: Tensor, length_E: Tensor, total: int) -> Tensor:
    """The integers start, start + 1, .. of each sequence, one sequence after another."""
    before_E = length_E.cumsum(0) - length_E
    return torch.arange(total, device=start_E.device) + (start_E - before_E).repeat_interleave(
        length_E, output_size=total
    )


def batches(plan: ClusterPlan, row_bytes: int, most_sequences: int) -> Iterator[PackedBatch]:
    """Batches of all clusters that have queries and keys, of up to BATCH_BYTES of keys, or of one longer list."""
    device, groups = plan.kv_index_Z.device, plan.batch * plan.heads
    host = torch.cat((plan.q_offsets_GC.flatten(), plan.kv_offsets)).cpu()
    q_offsets_GC, kv_offsets = host[: -len(plan.kv_offsets)].view(groups, -1), host[-len(plan.kv_offsets) :]
    size, length = q_offsets_GC.diff(dim=1).flatten(), kv_offsets.diff()
    used = ((size > 0) & (length > 0)).nonzero()[:, 0]
    if not len(used):
        return
    by_keys = length[used].cumsum(0) * row_bytes // BATCH_BYTES
    by_number = torch.arange(len(used)) // most_sequences
    _, counts = torch.stack((by_keys, by_number)).unique_consecutive(dim=1, return_counts=True)
    head = torch.arange(groups, device=device)[:, None]
    sorted_query = (plan.q_index_GN + head * plan.queries).flatten()
    place = (q_offsets_GC[:, :-1] + torch.arange(groups)[:, None] * plan.queries).flatten()
    for rows in used.split(counts.tolist()):
        sizes, lengths = size[rows], length[rows]
        table = torch.stack((place[rows], sizes, kv_offsets[rows], lengths, rows // plan.clusters * plan.keys))
        at, sizes_E, begin, lengths_E, base = table.to(device)
        total, keys = int(sizes.sum()), int(lengths.sum())
        key_S = plan.kv_index_Z[_spread(begin, lengths_E, keys)].long()
        yield PackedBatch(
            sorted_query[_spread(at, sizes_E, total)],
            key_S + base.repeat_interleave(lengths_E, output_size=keys),
            sizes.cumsum(0).tolist(),
            lengths.cumsum(0).tolist(),
            int(sizes.max()),
            int(lengths.max()),
        )


def packed_kernel(
    name: str, refuses: Refuses, forward_op: PackedForward, backward_op: PackedBackward, most_sequences: int = 1 << 30
) -> SparseKernel:
    """The kernel of an operator for packed sequences. Means are a second part of the softmax, merged."""

    def parts(plan: ClusterPlan, k: Tensor) -> Iterator[PackedBatch]:
        return batches(plan, k.shape[-1] * k.element_size(), most_sequences)

    def forward(
        q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.reshape(-1, 1, x.shape[-1]) for x in (q_BAND, k_BAMD, v_BAMD))
        out = q.new_zeros(len(q), 1, v.shape[-1])
        lse = torch.full((len(q),), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for batch in parts(plan, k):
            part = forward_op(q[batch.query_T], k[batch.key_S], v[batch.key_S], batch, scale)
            out[batch.query_T], lse[batch.query_T] = part
        out_BAND, lse_BAN = out.view(*q_BAND.shape[:3], -1), lse.view(q_BAND.shape[:3])
        return with_means(q_BAND, out_BAND, lse_BAN, plan, means, scale)

    def backward(
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
        q, k, v, out, dout = (x.reshape(-1, 1, x.shape[-1]) for x in (q_BAND, k_BAMD, v_BAMD, out_BAND, dout_BAND))
        lse, wide = lse_BAN.flatten(), lse_BAN.dtype
        dq, dk, dv = torch.zeros_like(q), k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
        for batch in parts(plan, k):
            at, keys = batch.query_T, batch.key_S
            dq[at], dk_part, dv_part = backward_op(dout[at], q[at], k[keys], v[keys], out[at], lse[at], batch, scale)
            # sorts on accelerators, and so adds in a fixed order
            dk.index_put_((keys,), dk_part.to(wide), accumulate=True)
            dv.index_put_((keys,), dv_part.to(wide), accumulate=True)
        dq_BAND = dq.view(q_BAND.shape)
        dq_BAND, dmeans = with_means_backward(dq_BAND, dout_BAND, q_BAND, out_BAND, lse_BAN, plan, means, scale)
        return dq_BAND, dk.view(k_BAMD.shape).to(k.dtype), dv.view(v_BAMD.shape).to(v.dtype), dmeans

    return SparseKernel(name, refuses, explicit(forward, backward))
