"""Compute sparse self-attention of a sequence that is split over ranks.

    ulysses, ring    what runs
    u, 1             all-to-all; each rank plans and computes its own heads, as one process would; all-to-all. As long as a threshold is
                     not set, it is computed for the heads of a rank, not for all of a sample
    1, r             each rank groups its own queries, all choose the keys that these groups keep (`split_plan`), and kept rows travel
                     (`exchange`); each rank computes its plan over the table of rows that it received
    u, r             all-to-all, the ring's way, all-to-all

On a ring, clusters are of one rank's queries: smaller ones are better there, and Ulysses is preferable where the heads allow it.

A plan's decisions, and the received rows, are recorded in the first pass and replayed when a checkpoint recomputes it (`mmspeed.replay`):
then nothing is sent. Every rank makes the same exchanges in the same order, even without tokens.

Legend: B batch, A heads, N queries and M keys that this rank holds, D head width, X position axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import all_gather, all_to_all
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.block_attention import block_forward, merge
from mmspeed.compute.sparse.cluster_plan import TailClusters, key_means
from mmspeed.compute.sparse.dispatch import SparseOutput, Stats
from mmspeed.compute.sparse.module import CALIBRATION, ClusteredAttention
from mmspeed.compute.sparse.planners.selection import KeepRule
from mmspeed.graphs import outside_graphs
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, of_nothing, with_heads_exchanged
from mmspeed.parallel.sequence.ring import ring_attention
from mmspeed.protocols.plan import AttentionLayout
from mmspeed.replay import apart

from .exchange import fetch
from .split_plan import SplitPlan, plan_split


@outside_graphs
def sparse_attention(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None,
    axes: SequenceAxes,
    q_sizes: Sequence[int],
    k_sizes: Sequence[int],
    positions_NX: Tensor,
    layer: ClusteredAttention,
    *,
    layout: AttentionLayout = "BNAD",
) -> Tensor:
    """Self-attention of this rank's part of a sequence, by a layer in its present state, sparse or dense: `out_BAND`.

    Args:
        key_mask_BM: bool, True at keys of this rank's part that count; None on all ranks or on none.
        q_sizes, k_sizes: lengths of the parts of all ranks of the group, 0 allowed.
        positions_NX: whole numbers, frame first, of all tokens in the order of the group's ranks.
        layout: as in `hybrid_attention`. Planners and kernels read head by head, so received tensors are copied once into that order.

    Every rank makes the call, and its backward. Under autocast, computes in its dtype.
    Raises UserError for fewer heads than Ulysses ranks, ValueError for sizes that do not fit.
    """
    q_BAND, k_BAMD, v_BAMD = autocast_alike(q_BAND, k_BAMD, v_BAMD)
    ring, lengths = axes.ring, axes.joined(k_sizes)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if ring.size == 1:
            return layer.attend(q, k, v, mask, positions_NX) if q.numel() and k.numel() else of_nothing(q, k, v)
        own = positions_NX.split(lengths)[ring.rank]
        return _over_ring(q, k, v, mask, axes, lengths, own, layer)

    return with_heads_exchanged(q_BAND, k_BAMD, v_BAMD, key_mask_BM, axes, q_sizes, k_sizes, attend, layout=layout)


def _over_ring(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None,
    axes: SequenceAxes,
    lengths: tuple[int, ...],
    positions_NX: Tensor,
    layer: ClusteredAttention,
) -> Tensor:
    """The output of `ClusteredAttention.forward` for one ring rank's part of the tokens; `positions_NX` are those of its part."""
    ring, tokens = axes.ring, sum(lengths)

    def plan(keep: KeepRule) -> SplitPlan:
        with torch.no_grad():
            context = layer.context(key_mask_BM, positions_NX)
            split_plan = plan_split(
                q_BAND.detach(),
                k_BAMD.detach(),
                keep,
                context,
                ring,
                lengths,
                layer.settings,
                way=layer.way,
                tail_clusters=layer.tail_clusters(tokens),
                starts=layer.warm_start(),
            )
            layer.carry_over(split_plan.plan.centroids_GCD, split_plan.tail_centroids_GKD)
            return split_plan

    dense, first = layer.record_or_replay(lambda: layer.is_dense(tokens))
    if dense:
        if first and layer.calibrates(tokens):
            with apart():
                plan(CALIBRATION)
        layer.counter["dense"] += 1
        return ring_attention(q_BAND, k_BAMD, v_BAMD, key_mask_BM, ring, lengths, window=axes.window, outer=axes.outer)
    split, first = layer.record_or_replay(lambda: layer.timed(lambda: plan(layer.keep())))
    attended = attend_split(q_BAND, k_BAMD, v_BAMD, split, ring, layer)
    if first:
        layer.note(replace(split.plan, keys=tokens), attended)
        if layer.watching and layer.training:
            rows = layer.sampled_rows(q_BAND.shape[2], q_BAND.device)
            with apart():
                exact = exact_rows(q_BAND.detach()[:, :, rows], k_BAMD, v_BAMD, key_mask_BM, ring)
            layer.add_error(attended.out_BAND.detach()[:, :, rows], exact)
    return attended.out_BAND


def attend_split(
    q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, split: SplitPlan, ring: Axis, layer: ClusteredAttention
) -> SparseOutput:
    """Attention of this rank's queries to those keys of all ranks that its query clusters keep."""
    means = None
    if split.label_GM is not None:
        tail = TailClusters(split.label_GM, split.mean_sizes[ring.rank], torch.empty(0))
        means = key_means(k_BAMD, v_BAMD, tail)
    k_BATD, v_BATD, means = fetch(k_BAMD, v_BAMD, means, split.mean_sizes, split.rows, ring)
    if q_BAND.numel():
        return layer.compute(q_BAND, k_BATD, v_BATD, split.plan, means=means)
    out = of_nothing(q_BAND, k_BATD, v_BATD)
    if means is not None:
        out = out + means.k_BAKD[..., :0].sum() + means.v_BAKD[..., :0].sum()
    nothing = q_BAND.new_zeros(())
    return SparseOutput(out, q_BAND.new_zeros(q_BAND.shape[:3]), Stats("none", split.plan.kept_share(), nothing))


@torch.no_grad()
def exact_rows(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None, ring: Axis) -> Tensor:
    """Dense attention of a few queries of each rank to the keys of all ranks, to measure the error of sparse attention.

    Queries are gathered and keys stay: each rank attends to its own keys, and the partial outputs are sent back and merged.
    """
    counts = all_gather(torch.tensor([q_BAND.shape[2]], device=q_BAND.device), ring, 0).tolist()
    q_all = all_gather(q_BAND, ring, 2, counts)
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    out_all, lse_all = torch.zeros_like(q_all, dtype=wide), q_all.new_full(q_all.shape[:3], -torch.inf, dtype=wide)
    if q_all.numel() and k_BAMD.numel():
        out_all, lse_all = block_forward(q_all, k_BAMD, v_BAMD, key_mask_BM)
    both = torch.cat((out_all.to(wide), lse_all.to(wide)[..., None]), dim=3)[None]
    parts = all_to_all(both, ring, 3, 0, counts)
    out, lse = parts[0, ..., :-1], parts[0, ..., -1]
    for part in parts[1:]:
        out, lse = merge(out, lse, part[..., :-1], part[..., -1])
    return out
