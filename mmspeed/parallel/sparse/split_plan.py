"""Plan sparse attention for a sequence that is split over the ranks of a ring.

1. Each rank groups its own queries, as a planner of one process does, and its own keys where they are kept by tiles.
2. A vector per group (its mean query, or the place of its tile) is all-gathered: C D numbers per rank, few compared with the keys.
3. Each rank decides which of its own keys each group of any rank keeps, by probabilities over the keys of all ranks (`select`).
4. It sends each rank the decisions for that rank's groups (`exchange`). With a tail, it also sends how many keys of each of its key
clusters each group drops; the means of these clusters travel with the keys.

So keys are kept by the same rules as in one process; only the groups differ, since each is made of one rank's queries.

Legend: B batch, A heads, G = B x A, g some of the G, N queries and M keys of this rank, D head width, C groups of queries, of this rank or
of all, U units of this rank's keys that are kept or dropped whole: keys, or tiles of them, K clusters of this rank's keys, X position axes,
T places of the table of received keys, R ranks, W bytes of C bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import all_gather, all_to_all
from mmspeed.compute.sparse.cluster_plan import ClusterPlan, TailClusters
from mmspeed.compute.sparse.planners.selection import KeepRule, KeyMasks, PlannerContext
from mmspeed.config.sparse import SparseConfig

from .exchange import RowExchange, lists_of, pack_bits, route
from .groups import GroupedSequence, SequenceShard, grouped
from .select import choose, count_shares, gather_each, shares, threshold_of

# C x M scores or decisions to hold at a time
_BLOCK = {"cpu": 1 << 22}
_BLOCK_ELSE = 1 << 25

Starts = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class SplitPlan:
    """A rank's plan over its table of received keys, and the exchange that fills the table."""

    plan: ClusterPlan  # its keys are places of the table
    rows: RowExchange
    label_GM: Tensor | None  # the cluster of each of this rank's keys, whose means are sent; None: no tail
    mean_sizes: tuple[int, ...]  # number of key clusters of each rank
    tail_centroids_GKD: Tensor | None  # of this rank's key clusters


@dataclass(frozen=True)
class GlobalGroups:
    """The query groups of all ranks, with what they need from each rank."""

    sizes_R: tuple[int, ...]  # C of each rank
    means_R: tuple[int, ...]  # K of each rank
    units: int  # the largest U of a rank
    sign_GCD: Tensor  # of all ranks' groups
    weight_GC: Tensor  # number of queries of each group
    seen_B: Tensor  # number of keys that count, of all ranks

    @staticmethod
    def of(own_groups: GroupedSequence, seen_B: Tensor, ring: Axis) -> GlobalGroups:
        device = own_groups.sign_GCD.device
        table = gather_each(
            torch.tensor([own_groups.groups, own_groups.means, own_groups.size_GU.shape[1]], device=device), ring
        )
        groups, means, units = (tuple(column) for column in table.T.tolist())
        return GlobalGroups(
            groups,
            means,
            max(units),
            all_gather(own_groups.sign_GCD, ring, 1, groups),
            all_gather(own_groups.q_offsets_GC.diff(dim=1), ring, 1, groups),
            gather_each(seen_B, ring).sum(dim=0),
        )

    def blocks(self, keys: int) -> Iterator[slice]:
        """Yield slices of heads to compute at a time, which bound the memory; they are the same on every rank."""
        heads, pairs = self.weight_GC.shape[0], sum(self.sizes_R) * max(1, self.units, keys)
        step = max(1, _BLOCK.get(self.weight_GC.device.type, _BLOCK_ELSE) // pairs)
        for start in range(0, heads, step):
            yield slice(start, min(start + step, heads))


@torch.no_grad()
def plan_split(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    keep: KeepRule,
    context: PlannerContext,
    ring: Axis,
    lengths: Sequence[int],
    settings: SparseConfig,
    *,
    way: int = 0,
    tail_clusters: int = 0,
    starts: Starts = (None, None),
) -> SplitPlan:
    """Plan this rank's queries over the keys of all ranks. Every rank must make the call, even without tokens.

    Args:
        context: masks and positions of this rank's keys.
        lengths: the number of keys of each rank.
        way: see `plan_skip`.
        tail_clusters: the number of key clusters of all ranks together; 0: no tail. Tiles have a tail by `settings.tail` instead.
        starts: the centroids at which k-means of this rank's queries, and of its keys, start.

    Raises ValueError for queries that keep all keys, which a ring does not support, and for masks that do not fit.
    """
    if context.full_queries_N is not None:
        raise ValueError("queries that keep every key are not served over a ring")
    batch, heads, queries, width = q_BAND.shape
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    q_GND, k_GMD = q_BAND.flatten(0, 1).to(wide), k_BAMD.flatten(0, 1).to(wide)
    masks = KeyMasks.of(context, batch, heads, queries, k_BAMD.shape[2], q_BAND.device)
    if masks.seen_BM is not None:  # masked keys may have any value
        k_GMD = k_GMD.masked_fill(~masks.seen_BM.repeat_interleave(heads, dim=0)[..., None], 0.0)
    scale = width**-0.5 if context.scale is None else context.scale
    part = SequenceShard(q_GND, k_GMD, masks, scale, context.positions_NX, settings, way, tail_clusters, starts)
    longest = max(lengths)
    with torch.autocast(q_BAND.device.type, enabled=False):
        own_groups = grouped(part, ring, sum(lengths[: ring.rank]))
        all_groups = GlobalGroups.of(own_groups, masks.count_B, ring)
        tau_G = thresholds(own_groups, all_groups, masks, keep, ring, longest)
        bits_RGMW, dropped_GCK = decide(own_groups, all_groups, masks, keep, tau_G, ring, longest, context)
        rows, bits_GTW = route(bits_RGMW, ring)
        index_Z, offsets = lists_of(bits_GTW, own_groups.groups, _BLOCK.get(q_BAND.device.type, _BLOCK_ELSE))
        tail = None
        if dropped_GCK is not None:
            dropped_GCK = all_to_all(dropped_GCK, ring, 1, 2, all_groups.sizes_R, all_groups.means_R)
            nowhere = torch.full((batch * heads, rows.table), sum(all_groups.means_R), device=q_BAND.device)
            tail = TailClusters(nowhere, sum(all_groups.means_R), dropped_GCK)
    plan = ClusterPlan(
        batch,
        heads,
        queries,
        rows.table,
        own_groups.q_index_GN,
        own_groups.q_offsets_GC,
        index_Z,
        offsets,
        tail,
        centroids_GCD=own_groups.sign_GCD if settings.grouping == "clusters" else None,
        tau_G=tau_G if keep.by_threshold and not own_groups.fixed else None,
    )
    if own_groups.tail is None:
        return SplitPlan(plan, rows, None, all_groups.means_R, None)
    return SplitPlan(plan, rows, own_groups.tail.label_GM, all_groups.means_R, own_groups.tail.centroid_GKD)


def thresholds(
    own_groups: GroupedSequence, all_groups: GlobalGroups, masks: KeyMasks, keep: KeepRule, ring: Axis, longest: int
) -> Tensor:
    """The threshold tau of each head, (G,).

    For the rule "fraction", all heads of a sample have the tau that keeps this fraction of their query-key pairs on this ring; it is found
    to about a hundredth of its value.
    """
    value = keep.value if keep.rule == "threshold" else 0.0
    tau_G = torch.full((all_groups.weight_GC.shape[0],), value, dtype=torch.float32, device=all_groups.weight_GC.device)
    if keep.rule != "fraction" or own_groups.fixed:
        return tau_G
    seen_G, counts = all_groups.seen_B.repeat_interleave(masks.heads), []
    for some in all_groups.blocks(longest):
        score = own_groups.judge(_of(all_groups.sign_GCD, some), some)
        size = own_groups.size_GU[some]
        masses = shares(score, size, seen_G[some], _always(own_groups, some), ring, own_groups.weight(some, keep))
        counts.append(count_shares(masses.share_GCU, all_groups.weight_GC[some, :, None] * size[:, None]))
    counts_BL = torch.cat(counts).unflatten(0, (-1, masks.heads)).sum(dim=1)
    return threshold_of(gather_each(counts_BL, ring).sum(dim=0), keep.value).repeat_interleave(masks.heads)


def decide(
    own_groups: GroupedSequence,
    all_groups: GlobalGroups,
    masks: KeyMasks,
    keep: KeepRule,
    tau_G: Tensor,
    ring: Axis,
    longest: int,
    context: PlannerContext,
) -> tuple[list[Tensor], Tensor | None]:
    """Decide which keys of this rank each group of any rank keeps.

    Returns, for each rank, the decisions for its groups as bits (G, M, W); and, with a tail, the number of keys that each group drops from
    each cluster of this rank's keys, (G, C, K).
    """
    seen_G = all_groups.seen_B.repeat_interleave(masks.heads)
    parts, dropped = [], []
    for some in all_groups.blocks(longest):
        weight_gC = all_groups.weight_GC[some]
        kept_gCU, always = own_groups.judge(_of(all_groups.sign_GCD, some), some), _always(own_groups, some)
        if own_groups.fixed:
            kept_gCU = kept_gCU if always is None else kept_gCU | always[:, None]
        else:
            size, weight = own_groups.size_GU[some], own_groups.weight(some, keep)
            masses = shares(kept_gCU, size, seen_G[some], always, ring, weight)
            if context.observe is not None and kept_gCU.numel():
                _observe(context, masses.share_GCU, weight_gC, own_groups, masks, some)
            kept_gCU = choose(masses, keep, tau_G[some], ring)
        kept_gCM = kept_gCU if own_groups.unit_M is None else kept_gCU.index_select(2, own_groups.unit_M)
        seen = masks.seen(some)
        kept_gCM = kept_gCM if seen is None else kept_gCM & seen
        if own_groups.fixed:
            kept_gCM = kept_gCM | _first_for_none(kept_gCM, seen, ring)
        kept_gCM = kept_gCM & (weight_gC > 0)[..., None]
        if own_groups.tail is not None:
            dropped.append(_dropped(kept_gCM, own_groups.tail.label_GM[some], own_groups.tail.size_GK[some]))
        parts.append([pack_bits(part) for part in kept_gCM.split(all_groups.sizes_R, dim=1)])
    return [torch.cat(of_rank) for of_rank in zip(*parts, strict=True)], torch.cat(dropped) if dropped else None


def _dropped(kept_gCM: Tensor, label_gM: Tensor, size_gK: Tensor) -> Tensor:
    """Count the keys of each key cluster that each group drops: float32, (g, C, K). Counted as integers, so the order does not matter."""
    (groups, rows, _), clusters = kept_gCM.shape, size_gK.shape[1]
    if not clusters:
        return torch.zeros(groups, rows, 0, device=size_gK.device)
    g, c, m = kept_gCM.nonzero(as_tuple=True)
    code_Z = (g * rows + c) * clusters + label_gM[g, m]
    kept_gCK = torch.bincount(code_Z, minlength=groups * rows * clusters).view(groups, rows, clusters)
    return (size_gK[:, None] - kept_gCK).float()


def _first_for_none(kept_gCM: Tensor, seen_g1M: Tensor | None, ring: Axis) -> Tensor:
    """Choose the first key of all ranks that counts, for groups that would keep none: bool, True only on the rank that holds it."""
    valid_g1M = torch.ones_like(kept_gCM[:, :1]) if seen_g1M is None else seen_g1M
    counts = torch.stack((kept_gCM.sum(dim=2), valid_g1M.sum(dim=2).expand(kept_gCM.shape[:2])))
    kept_RgC, valid_RgC = gather_each(counts, ring).unbind(dim=1)
    mine_gC = (kept_RgC.sum(dim=0) == 0) & (valid_RgC[: ring.rank].sum(dim=0) == 0)
    return mine_gC[..., None] & valid_g1M & (valid_g1M.cumsum(dim=2) == 1)


def _observe(
    context: PlannerContext,
    share_gCU: Tensor,
    weight_gC: Tensor,
    own_groups: GroupedSequence,
    masks: KeyMasks,
    some: slice,
) -> None:
    """Report the probabilities of these heads to `context.observe`, by key even where keys are kept by tiles."""
    assert context.observe is not None
    share_gCM = share_gCU if own_groups.unit_M is None else share_gCU.index_select(2, own_groups.unit_M)
    seen = masks.seen(some)
    context.observe(share_gCM if seen is None else share_gCM.masked_fill(~seen, -1.0), weight_gC, some)


def _always(own_groups: GroupedSequence, some: slice) -> Tensor | None:
    return None if own_groups.always_GU is None else own_groups.always_GU[some]


def _of(sign_GCD: Tensor, some: slice) -> Tensor:
    return sign_GCD if sign_GCD.shape[0] == 1 else sign_GCD[some]
