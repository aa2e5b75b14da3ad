"""Group the queries and keys of one rank of a ring, as the planners of one process group those of the whole sequence.

Legend: B batch, A heads, G = B x A, N queries and M keys of this rank, D head width, C groups of this rank's queries, U units of its keys
that are kept or dropped whole: keys, or tiles of them, K clusters of its keys, X position axes, g some of the G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import even_sizes
from mmspeed.compute.sparse.planners.clusters import KeyClusters, lost_variance, sort_queries, tail_of_keys
from mmspeed.compute.sparse.planners.kmeans import covariance, kmeans, sorted_means, sums
from mmspeed.compute.sparse.planners.patterns import skip_group
from mmspeed.compute.sparse.planners.selection import KeepRule, KeyMasks
from mmspeed.compute.sparse.planners.tiles import Tiling, tiling
from mmspeed.config.sparse import SparseConfig

from .select import gather_each

# (vectors of the groups of all ranks for some heads, these heads) -> scores of this rank's units, or bools (kept)
Judge = Callable[[Tensor, slice], Tensor]
SUBSAMPLE = 4  # k-means updates its centroids from every fourth query, or key


@dataclass(frozen=True)
class SequenceShard:
    """A rank's part of a sequence, with the settings by which it is grouped. Masked keys are 0."""

    q_GND: Tensor
    k_GMD: Tensor
    masks: KeyMasks
    scale: float
    positions_NX: Tensor | None
    settings: SparseConfig
    way: int = 0
    tail_clusters: int = 0  # number of key clusters of all ranks
    starts: tuple[Tensor | None, Tensor | None] = (None, None)  # initial centroids of k-means, for queries and for keys
    seen_GM: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        seen_BM = self.masks.seen_BM
        object.__setattr__(self, "seen_GM", None if seen_BM is None else seen_BM.repeat_interleave(self.masks.heads, 0))

    @property
    def iterations(self) -> int:
        return self.settings.iterations if self.starts[0] is None else 0

    def tail(self, ring: Axis) -> KeyClusters | None:
        """Cluster this rank's keys; it has its share of the clusters of all ranks, and at least one where it has keys. None: no tail."""
        if not self.tail_clusters:
            return None
        groups, keys, width = self.k_GMD.shape
        if not keys:
            none = torch.zeros(groups, 0, dtype=torch.int64, device=self.k_GMD.device)
            return KeyClusters(none, self.k_GMD.new_zeros(groups, 0, width), none)
        share = max(1, even_sizes(self.tail_clusters, ring.size)[ring.rank])
        return tail_of_keys(self.k_GMD, self.seen_GM, share, self.iterations, SUBSAMPLE, self.starts[1])


@dataclass(frozen=True)
class GroupedSequence:
    """A rank's queries and keys in groups."""

    q_index_GN: Tensor
    q_offsets_GC: Tensor
    sign_GCD: (
        Tensor  # the vector that represents a group of queries; (1, C, D), the same for all heads, where it is no mean
    )
    size_GU: Tensor  # float: number of keys of a unit that count
    judge: Judge
    fixed: bool = False  # `judge` returns which units are kept, not scores
    unit_M: Tensor | None = None  # the unit of each key; None: each key is a unit
    always_GU: Tensor | None = None  # units that are always kept
    tail: KeyClusters | None = None
    weight_GU: Tensor | None = None  # a factor of each unit's probability, where keys are kept by a threshold

    def weight(self, some: slice, keep: KeepRule) -> Tensor | None:
        """The weights of some heads' units under a keep rule; None: all 1."""
        return None if self.weight_GU is None or not keep.by_threshold else self.weight_GU[some]

    @property
    def groups(self) -> int:
        """The number C of this rank's query groups, per head."""
        return self.q_offsets_GC.shape[1] - 1

    @property
    def means(self) -> int:
        """The number K of this rank's key clusters."""
        return 0 if self.tail is None else self.tail.clusters


def grouped(part: SequenceShard, ring: Axis, first: int) -> GroupedSequence:
    """Group by the planner that the config names. Every rank makes the call.

    first: the index of this rank's first token in the sequence.
    """
    planner = part.settings.grouping
    if planner == "clusters":
        return by_clusters(part, ring)
    if planner == "skip":
        return by_skip(part, ring, first)
    return by_tiles(part, nearby=planner == "window")


def by_clusters(part: SequenceShard, ring: Axis) -> GroupedSequence:
    """Group queries by k-means, in the metric of the keys of all ranks (see `plan_clusters`); each key is a unit of its own."""
    groups, queries, width = part.q_GND.shape
    sigma_GDD = covariance_of_all(part.k_GMD, part.seen_GM, ring) if part.settings.metric == "logit" else None
    if queries:
        clusters = math.ceil(queries / part.settings.cluster_size)
        label_GN, start_GCD = kmeans(
            part.q_GND,
            clusters,
            iterations=part.iterations,
            subsample=SUBSAMPLE,
            start_GCD=part.starts[0],
            sigma_GDD=sigma_GDD,
        )
        order = sort_queries(label_GN, clusters)
        sign_GCD = sorted_means(part.q_GND, *order, start_GCD)
    else:
        order, sign_GCD = _nobody(part), part.q_GND.new_zeros(groups, 1, width)

    def judge(sign_gCD: Tensor, some: slice) -> Tensor:
        return (sign_gCD * part.scale) @ part.k_GMD[some].mT

    tail, weight_GU = part.tail(ring), None
    if tail is not None:
        square_G = mean_square_of_all(part.q_GND, ring)
        weight_GU = lost_variance(part.k_GMD, tail, square_G, part.scale) if part.k_GMD.shape[1] else None
    return GroupedSequence(*order, sign_GCD, _each_key(part), judge, False, None, _always(part), tail, weight_GU)


def by_tiles(part: SequenceShard, nearby: bool) -> GroupedSequence:
    """Group queries and keys by tiles of positions: see `plan_tiles`, and `plan_window` for `nearby`. A tile lies on one rank."""
    groups, queries, width = part.q_GND.shape
    if part.positions_NX is None or len(part.positions_NX) != queries or part.k_GMD.shape[1] != queries:
        raise ValueError("tiles need the positions of the queries, which are those of the keys")
    none = torch.zeros(0, dtype=torch.int64, device=part.q_GND.device)
    at, order = Tiling(none, none.new_zeros(0, 3)), _nobody(part)
    coords_1CX, number_GC = none.new_zeros(1, 1, 3), none.new_ones(groups, 1)
    if queries:
        at = tiling(part.positions_NX.to(none.device), part.settings.tile)
        coords_1CX = at.coords_RX[None]
        number_GC = torch.bincount(at.tile_N, minlength=at.count).expand(groups, -1)
        order = sort_queries(at.tile_N.expand(groups, -1), at.count)
    label_GM = at.tile_N.expand(groups, -1)
    if part.seen_GM is not None:
        label_GM = label_GM.masked_fill(~part.seen_GM, at.count)
    mean_GUD, size_GU = part.k_GMD.new_zeros(groups, 0, width), none.new_zeros(groups, 0)
    if queries:
        mean_GUD, size_GU = sums(part.k_GMD, label_GM, at.count)
        mean_GUD = mean_GUD / size_GU.clamp(min=1)[..., None]

    def near(coords_1CX: Tensor, some: slice) -> Tensor:
        half = torch.tensor(part.settings.window, device=coords_1CX.device) // 2
        place_CX = coords_1CX[0]
        near_CU = ((place_CX[:, None] - at.coords_RX).abs() <= half).all(dim=2) & (at.coords_RX >= 0).all(dim=1)
        near_CU |= (place_CX < 0).all(dim=1)[:, None]  # queries without a place keep every key
        return near_CU.expand(some.stop - some.start, -1, -1)

    def score(sign_gCD: Tensor, some: slice) -> Tensor:
        return sign_gCD @ mean_GUD[some].mT

    sign = coords_1CX
    if not nearby:
        label_GN = at.tile_N.expand(groups, -1)
        total = sums(part.q_GND, label_GN, at.count)[0] if queries else part.q_GND.new_zeros(groups, 1, width)
        sign = total * (part.scale / number_GC[..., None])
    tail = KeyClusters(label_GM.contiguous(), mean_GUD, size_GU) if part.settings.tail == "summary" else None
    judge = near if nearby else score
    size = size_GU.to(part.k_GMD.dtype)
    return GroupedSequence(*order, sign, size, judge, nearby, at.tile_N, _with_always(part, at), tail)


def by_skip(part: SequenceShard, ring: Axis, first: int) -> GroupedSequence:
    """Group every n-th token of the whole sequence: see `plan_skip`."""
    groups, queries, _ = part.q_GND.shape
    stride, device = part.settings.stride, part.q_GND.device

    label_N, label_M = (
        skip_group(torch.arange(first, first + count, device=device), stride, part.way)
        for count in (queries, part.k_GMD.shape[1])
    )
    order = sort_queries(label_N.expand(groups, -1), stride)

    def judge(sign_1C1: Tensor, some: slice) -> Tensor:
        return (sign_1C1[0] == label_M).expand(some.stop - some.start, -1, -1)

    sign_1C1 = torch.arange(stride, device=device)[None, :, None]
    return GroupedSequence(*order, sign_1C1, _each_key(part), judge, True, None, _always(part), part.tail(ring))


def covariance_of_all(k_GMD: Tensor, seen_GM: Tensor | None, ring: Axis) -> Tensor:
    """Covariance (G, D, D) of the keys of all ranks, merged from each rank's count, mean and covariance (Chan, Golub and LeVeque 1979)."""
    groups, keys, width = k_GMD.shape
    count, mean = k_GMD.new_zeros(groups), k_GMD.new_zeros(groups, width)
    spread = k_GMD.new_zeros(groups, width, width)
    if keys:
        count = count + keys if seen_GM is None else seen_GM.sum(dim=1).to(count.dtype)
        mean = k_GMD.sum(dim=1) / count.clamp(min=1.0)[:, None]
        spread = covariance(k_GMD, seen_GM)
    all_RGED = gather_each(torch.cat((spread, mean[:, None], count[:, None, None].expand(-1, 1, width)), dim=1), ring)
    count_RG1, mean_RGD = all_RGED[:, :, -1, :1], all_RGED[:, :, -2].nan_to_num(0.0, 0.0, 0.0)
    weight_RG1 = count_RG1 / count_RG1.sum(dim=0).clamp(min=1.0)
    away_RGD = mean_RGD - (weight_RG1 * mean_RGD).sum(dim=0)
    around = all_RGED[:, :, :width] + away_RGD[..., None] * away_RGD[:, :, None]
    return (weight_RG1[..., None] * around).sum(dim=0)


def mean_square_of_all(q_GND: Tensor, ring: Axis) -> Tensor:
    """The mean square of the queries' channels over all ranks, per head (G,): see `mean_square`."""
    count = q_GND.new_full((len(q_GND),), q_GND.shape[1] * q_GND.shape[2])
    total_RG, count_RG = gather_each(torch.stack((q_GND.square().sum(dim=(1, 2)), count)), ring).unbind(dim=1)
    return total_RG.sum(dim=0) / count_RG.sum(dim=0).clamp(min=1.0)


def _nobody(part: SequenceShard) -> tuple[Tensor, Tensor]:
    """(q_index_GN, q_offsets_GC) of a rank without queries: one empty group."""
    groups = part.q_GND.shape[0]
    index_GN = torch.zeros(groups, 0, dtype=torch.int64, device=part.q_GND.device)
    return index_GN, index_GN.new_zeros(groups, 2)


def _each_key(part: SequenceShard) -> Tensor:
    if part.seen_GM is not None:
        return part.seen_GM.to(part.k_GMD.dtype)
    return part.k_GMD.new_ones(part.k_GMD.shape[:2])


def _always(part: SequenceShard) -> Tensor | None:
    always_BM = part.masks.always_BM
    return None if always_BM is None else always_BM.repeat_interleave(part.masks.heads, dim=0)


def _with_always(part: SequenceShard, at: Tiling) -> Tensor | None:
    """The tiles (G, U) that hold a key that is always kept; None where no key is."""
    always_GM = _always(part)
    if always_GM is None:
        return None
    hits_GU = torch.zeros(always_GM.shape[0], at.count, dtype=torch.int64, device=always_GM.device)
    return hits_GU.scatter_add_(1, at.tile_N.expand_as(always_GM), always_GM.long()) > 0
