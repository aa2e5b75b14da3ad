"""Plans of sparse attention: groups of queries, and the keys that each keeps.

A plan holds integers and no gradient. A planner makes it from detached queries and keys, and every kernel uses it in forward and
backward; recomputation uses the plan of the first pass.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys, R tiles of keys,
Z kept keys of all clusters together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TailClusters:
    """Clusters of keys, whose means replace the keys that a cluster of queries drops.

    After PISA (2026), which approximates blocks that are not computed exactly; here by clusters of tokens.
    """

    label_GM: Tensor  # int64: the cluster of each key; `clusters` at keys that are masked
    clusters: int  # K
    dropped_GCK: Tensor  # float32: the number of keys of each cluster of keys that a cluster of queries drops


@dataclass(frozen=True)
class Tiles:
    """The kept tiles, where keys are kept by whole tiles that are the same for all heads, as block kernels need."""

    key_index_M: Tensor  # int64, sorted place -> key: those of tile 0 first
    key_offsets_R: Tensor  # int64, R + 1
    kept_GCR: Tensor  # bool; a kept tile may hold masked keys, which are in no list


@dataclass(frozen=True)
class ClusterMeans:
    """Mean key and value of each cluster of keys; gradients flow through them."""

    k_BAKD: Tensor
    v_BAKD: Tensor


@dataclass(frozen=True)
class ClusterPlan:
    """The keys that each cluster of queries keeps. Clusters are numbered within a head; one may be empty."""

    batch: int
    heads: int
    queries: int
    keys: int
    q_index_GN: Tensor  # int64, sorted place -> query: those of cluster 0 first, ascending within a cluster
    q_offsets_GC: Tensor  # int64, C + 1 columns: the start of each cluster among the sorted queries of its head
    kv_index_Z: Tensor  # int32: kept keys (0 .. M - 1), ascending within a cluster; cluster by cluster, head by head
    kv_offsets: Tensor  # int64, G C + 1: the start of each cluster's kept keys
    tail: TailClusters | None = None
    tiles: Tiles | None = None
    centroids_GCD: Tensor | None = None  # for a warm start, in the planner's own metric
    tail_centroids_GKD: Tensor | None = None
    tau_G: Tensor | None = None  # float32: the threshold x M that was used; 0 keeps all

    @property
    def clusters(self) -> int:
        """Number of clusters of queries, C."""
        return self.q_offsets_GC.shape[1] - 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes (B, A, N, M)."""
        return self.batch, self.heads, self.queries, self.keys

    def sizes(self) -> Tensor:
        """Queries of each cluster, int64."""
        return self.q_offsets_GC.diff(dim=1)

    def lengths(self) -> Tensor:
        """Keys that each cluster keeps, int64."""
        return self.kv_offsets.diff().view(-1, self.clusters)

    def kept_pairs(self) -> Tensor:
        """Pairs of a query and a key that are kept, by head, int64."""
        return (self.sizes() * self.lengths()).sum(dim=1).view(self.batch, self.heads)

    def kept_share(self) -> Tensor:
        """Share of all pairs that is kept, by head, float32. Stays on the device."""
        return self.kept_pairs().float() / max(1, self.queries * self.keys)

    def cluster_of_query(self) -> Tensor:
        """The cluster of each query, in the queries' own order, int64."""
        places_N = torch.arange(self.queries, device=self.q_index_GN.device)
        ends_GC = self.q_offsets_GC[:, 1:].contiguous()
        sorted_GN = torch.searchsorted(ends_GC, places_N.expand(ends_GC.shape[0], -1).contiguous(), right=True)
        return torch.empty_like(self.q_index_GN).scatter_(1, self.q_index_GN, sorted_GN)

    def kept_keys(self) -> Tensor:
        """True at kept keys, bool (G, C, M): for small inputs."""
        groups, clusters = self.sizes().shape
        kept = torch.zeros(groups * clusters, self.keys, dtype=torch.bool, device=self.kv_index_Z.device)
        row_Z = torch.repeat_interleave(torch.arange(groups * clusters, device=kept.device), self.kv_offsets.diff())
        kept[row_Z, self.kv_index_Z.long()] = True
        return kept.view(groups, clusters, self.keys)

    def kept_mask(self) -> Tensor:
        """True at kept pairs. O(N M): for the oracle and for small inputs."""
        cluster_GN = self.cluster_of_query()
        mask_GNM = self.kept_keys().gather(1, cluster_GN[..., None].expand(-1, -1, self.keys))
        return mask_GNM.view(self.batch, self.heads, self.queries, self.keys)

    def check(self) -> None:
        """Raises ValueError where the plan's fields are inconsistent. Copies to the host: for tests and for plans made by hand."""
        groups, clusters = self.batch * self.heads, self.clusters
        if self.q_index_GN.shape != (groups, self.queries) or self.q_offsets_GC.shape[0] != groups:
            raise ValueError(f"a plan of {groups} heads has queries of the shape {tuple(self.q_index_GN.shape)}")
        all_queries = torch.arange(self.queries, device=self.q_index_GN.device).expand(groups, -1)
        if not torch.equal(self.q_index_GN.sort(dim=1).values, all_queries):
            raise ValueError("a plan holds each query of a head once")
        starts, ends = self.q_offsets_GC[:, 0], self.q_offsets_GC[:, -1]
        if (starts != 0).any() or (ends != self.queries).any() or (self.sizes() < 0).any():
            raise ValueError("the clusters of a head begin at 0, end at the number of queries and do not overlap")
        offsets = self.kv_offsets
        if offsets.shape != (groups * clusters + 1,) or offsets[0] != 0 or offsets[-1] != len(self.kv_index_Z):
            raise ValueError("the lists of kept keys begin at 0 and end at their number")
        if (offsets.diff() < 0).any():
            raise ValueError("the lists of kept keys do not overlap")
        index = self.kv_index_Z
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= self.keys):
            raise ValueError(f"kept keys lie in 0 .. {self.keys - 1}")
        first = torch.zeros(len(index) + 1, dtype=torch.bool, device=index.device)
        first[offsets] = True
        if ((index.diff() <= 0) & ~first[1:-1]).any():
            raise ValueError("the kept keys of a cluster ascend")


def fits(plan: ClusterPlan, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor) -> str:
    """The reason why a plan does not fit queries, keys and values; empty when it does."""
    if q_BAND.dim() != 4 or k_BAMD.dim() != 4 or k_BAMD.shape[:3] != v_BAMD.shape[:3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BAND, k_BAMD, v_BAMD))
        return f"queries, keys and values of shapes {shapes} do not fit"
    if not q_BAND.dtype == k_BAMD.dtype == v_BAMD.dtype:
        return f"queries, keys and values are {q_BAND.dtype}, {k_BAMD.dtype} and {v_BAMD.dtype}: cast them to one dtype"
    if k_BAMD.shape[:2] != q_BAND.shape[:2] or k_BAMD.shape[3] != q_BAND.shape[3]:
        return f"queries {tuple(q_BAND.shape)} and keys {tuple(k_BAMD.shape)} differ in batch, heads or width"
    wanted = (*q_BAND.shape[:3], k_BAMD.shape[2])
    if plan.shape != wanted:
        return f"the plan is of (batch, heads, queries, keys) {plan.shape}, not of {tuple(wanted)}"
    if plan.q_index_GN.device != q_BAND.device:
        return f"the plan is on {plan.q_index_GN.device}, the queries are on {q_BAND.device}"
    return ""


def usual_tail_clusters(keys: int) -> int:
    """The default number of clusters of keys: one for 128 keys up to 16,384, then the root, so that their relative cost falls."""
    return max(1, math.ceil(keys / 128) if keys <= 16_384 else round(math.sqrt(keys)))


def key_means(k_BAMD: Tensor, v_BAMD: Tensor, tail: TailClusters) -> ClusterMeans:
    """Means of the keys and values of each cluster, over all its keys that are not masked, kept or not.

    Summed in float32 at least, in the order of the keys on every device. A cluster without keys has means 0 and, in every plan, drops
    none.
    """
    wide, shape = torch.promote_types(k_BAMD.dtype, torch.float32), k_BAMD.shape[:2]
    rows = (x_BAMD.flatten(0, 1).to(wide) for x_BAMD in (k_BAMD, v_BAMD))
    *sums, size_GK = _ClusterSums.apply(*rows, tail.label_GM, tail.clusters)
    share_GK1 = size_GK.to(wide).clamp(min=1.0).reciprocal()[..., None]
    return ClusterMeans(*((sum_GKD * share_GK1).to(k_BAMD.dtype).unflatten(0, shape) for sum_GKD in sums))


class _ClusterSums(torch.autograd.Function):
    """Sums over each cluster: (of its keys, of its values, their number (G, K)).

    By embedding bags, in the order of the keys: in-place additions would run in any order on accelerators.
    """

    @staticmethod
    def forward(
        ctx: Any, k_GMD: Tensor, v_GMD: Tensor, label_GM: Tensor, clusters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(label_GM)
        groups, keys, _ = k_GMD.shape
        sorted_GM, order_GM = label_GM.sort(dim=1, stable=True)
        numbers_GL = torch.arange(clusters + 1, device=k_GMD.device).expand(groups, -1).contiguous()
        begin_GL = torch.searchsorted(sorted_GM, numbers_GL)  # of each cluster, and of the masked keys
        size_GK = begin_GL.diff(dim=1)
        ctx.mark_non_differentiable(size_GK)
        first_G1 = torch.arange(groups, device=k_GMD.device)[:, None] * keys
        places, bags = (order_GM + first_G1).flatten(), (begin_GL + first_G1).flatten()

        def sums(x_GMD: Tensor) -> Tensor:
            if not keys or not clusters:
                return x_GMD.new_zeros(groups, clusters, x_GMD.shape[2])
            sum_LD = torch.nn.functional.embedding_bag(places, x_GMD.flatten(0, 1), bags, mode="sum")
            return sum_LD.view(groups, clusters + 1, x_GMD.shape[2])[:, :clusters]

        return sums(k_GMD), sums(v_GMD), size_GK

    @staticmethod
    def backward(ctx: Any, dk_GKD: Tensor, dv_GKD: Tensor, _: Any) -> Any:
        (label_GM,) = ctx.saved_tensors

        def spread(d_GKD: Tensor) -> Tensor:
            padded_GLD = torch.nn.functional.pad(d_GKD, (0, 0, 0, 1))  # nothing to masked keys
            return padded_GLD.gather(1, label_GM[..., None].expand(-1, -1, padded_GLD.shape[2]))

        return spread(dk_GKD), spread(dv_GKD), None, None
