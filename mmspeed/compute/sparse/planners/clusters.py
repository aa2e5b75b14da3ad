"""The default planner: queries with similar attention share their most relevant keys.

k-means of the queries (after Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020), in a metric of their
scores; the mean query of a cluster scores all keys, and a rule decides which are kept. Costs 1 / (2 x cluster size) of dense attention for
the scores, and O(N C D) for the clusters.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterPlan, TailClusters

from .kmeans import covariance, kmeans, means, sorted_means, spread
from .selection import KeepRule, KeyLists, KeyMasks, PlannerContext, Score, choose_keys

_LEAST_VARIANCE = 2.0**-12  # of a score: a key that is its mean


def plan_clusters(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    keep: KeepRule,
    context: PlannerContext | None = None,
    *,
    cluster_size: int = 128,
    metric: Literal["logit", "euclid"] = "logit",
    iterations: int = 3,
    subsample: int = 4,
    start_GCD: Tensor | None = None,
    tail_clusters: int = 0,
    tail_start_GKD: Tensor | None = None,
) -> ClusterPlan:
    """A plan by k-means of the queries; no gradient flows through it.

    Args:
        cluster_size: average queries of a cluster: there are ceil(N / cluster_size) clusters, and one more for `full_queries_N`.
        metric: "logit": rows of scores are compared, up to a constant; "euclid": queries are.
        iterations: of k-means, on one query of `subsample`; then all queries are assigned.
        start_GCD: starting centroids: `centroids_GCD` of an earlier plan of the same shapes; `iterations` may then be 0.
        tail_clusters: clusters of keys for tail="summary"; no more than there are keys; 0: none.
        tail_start_GKD: `tail_centroids_GKD` of an earlier plan.

    The plan's `centroids_GCD` are the mean queries of the clusters, without that of the full queries.
    Raises ValueError for shapes that do not fit.
    """
    if cluster_size < 1 or iterations < 0 or subsample < 1 or tail_clusters < 0:
        raise ValueError("cluster_size and subsample are positive, iterations and tail_clusters not negative")
    if metric not in ("logit", "euclid"):
        raise ValueError(f"metric {metric!r} is not one of logit, euclid")
    context = PlannerContext() if context is None else context
    with torch.no_grad(), torch.autocast(q_BAND.device.type, enabled=False):
        q_GND, k_GMD, masks = inputs(q_BAND, k_BAMD, context)
        mask_GM = group_mask(masks)
        some_GND = q_GND if masks.choosing is None else q_GND.index_select(1, masks.choosing)
        clusters = math.ceil(some_GND.shape[1] / cluster_size)
        sigma_GDD = None
        if metric == "logit":
            sigma_GDD = _spread_covariance(k_GMD, mask_GM, subsample)
        label_GN, centroid_GCD = kmeans(
            some_GND, clusters, iterations=iterations, subsample=subsample, start_GCD=start_GCD, sigma_GDD=sigma_GDD
        )
        order_GN, offsets_GC = sort_queries(label_GN, clusters)
        centroid_GCD = sorted_means(some_GND, order_GN, offsets_GC, centroid_GCD)
        tail = tail_of_keys(k_GMD, mask_GM, tail_clusters, iterations, subsample, tail_start_GKD)
        scale = q_BAND.shape[-1] ** -0.5 if context.scale is None else context.scale
        lists = choose_keys(
            scores(centroid_GCD, k_GMD, masks, scale),
            keep,
            masks,
            offsets_GC.diff(dim=1),
            label_GM=None if tail is None else tail.label_GM,
            labels=0 if tail is None else tail.clusters,
            observe=context.observe,
            key_weight_GM=None if tail is None else lost_variance(k_GMD, tail, mean_square(some_GND), scale),
        )
        q_index_GN, q_offsets_GC = with_full(order_GN, offsets_GC, masks)
    batch, heads, queries, _ = q_BAND.shape
    return ClusterPlan(
        batch,
        heads,
        queries,
        keys=k_BAMD.shape[2],
        q_index_GN=q_index_GN,
        q_offsets_GC=q_offsets_GC,
        kv_index_Z=lists.kv_index_Z,
        kv_offsets=lists.kv_offsets,
        tail=None if tail is None else tail.plan(lists),
        centroids_GCD=centroid_GCD,
        tail_centroids_GKD=None if tail is None else tail.centroid_GKD,
        tau_G=lists.tau_G if keep.by_threshold else None,
    )


def inputs(q_BAND: Tensor, k_BAMD: Tensor, context: PlannerContext) -> tuple[Tensor, Tensor, KeyMasks]:
    """Queries and keys in float32 at least, heads of all samples in one dimension; masked keys are 0. Raises ValueError."""
    if (
        q_BAND.dim() != 4
        or k_BAMD.dim() != 4
        or q_BAND.shape[:2] != k_BAMD.shape[:2]
        or q_BAND.shape[3] != k_BAMD.shape[3]
    ):
        raise ValueError(
            f"queries {tuple(q_BAND.shape)} and keys {tuple(k_BAMD.shape)} differ in batch, heads or width"
        )
    batch, heads, queries, _ = q_BAND.shape
    keys = k_BAMD.shape[2]
    if not queries or not keys:
        raise ValueError(f"a plan needs queries and keys, not {queries} and {keys}")
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    q_GND, k_GMD = q_BAND.detach().flatten(0, 1).to(wide), k_BAMD.detach().flatten(0, 1).to(wide)
    masks = KeyMasks.of(context, batch, heads, queries, keys, q_BAND.device)
    if masks.seen_BM is not None:  # masked keys may hold any values
        k_GMD = k_GMD.masked_fill(~masks.seen_BM.repeat_interleave(heads, dim=0)[..., None], 0.0)
    return q_GND, k_GMD, masks


def group_mask(masks: KeyMasks) -> Tensor | None:
    """Keys seen by each group, (G, M)."""
    return None if masks.seen_BM is None else masks.seen_BM.repeat_interleave(masks.heads, dim=0)


def scores(query_GCD: Tensor, k_GMD: Tensor, masks: KeyMasks, scale: float) -> Score:
    """The score function for `choose_keys`: scores of some queries with all keys, -inf at masked ones."""
    scaled_GCD = query_GCD * scale

    def score(groups: slice, clusters: slice) -> Tensor:
        score_gcM = scaled_GCD[groups, clusters] @ k_GMD[groups].mT
        seen = masks.seen(groups)
        return score_gcM if seen is None else score_gcM.masked_fill_(~seen, -torch.inf)

    return score


def sort_queries(label_GN: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """(order_GN, offsets_GC): queries by cluster, ascending within one, and the C + 1 offsets of clusters."""
    groups = len(label_GN)
    flat = label_GN + torch.arange(groups, device=label_GN.device)[:, None] * clusters
    size_GC = torch.bincount(flat.flatten(), minlength=groups * clusters).view(groups, clusters)
    return label_GN.sort(dim=1, stable=True).indices, torch.nn.functional.pad(size_GC.cumsum(dim=1), (1, 0))


def with_full(order_GN: Tensor, offsets_GC: Tensor, masks: KeyMasks) -> tuple[Tensor, Tensor]:
    """(q_index_GN, q_offsets_GC) of all queries, from the order and offsets of those that choose: the full ones are one more cluster."""
    if masks.full_F is None or masks.choosing is None:
        return order_GN, offsets_GC
    q_index_GN = torch.cat((masks.choosing[order_GN], masks.full_F.expand(len(order_GN), -1)), dim=1)
    return q_index_GN, torch.cat((offsets_GC, torch.full_like(offsets_GC[:, :1], q_index_GN.shape[1])), dim=1)


@dataclass(frozen=True)
class KeyClusters:
    """Clusters of keys, before the choice of dropped keys."""

    label_GM: Tensor
    centroid_GKD: Tensor
    size_GK: Tensor

    @property
    def clusters(self) -> int:
        """Number of clusters of keys, K."""
        return self.size_GK.shape[1]

    def plan(self, lists: KeyLists) -> TailClusters:
        """The clusters with the counts of keys that each cluster of queries drops."""
        assert lists.kept_GCK is not None
        return TailClusters(self.label_GM, self.clusters, (self.size_GK[:, None] - lists.kept_GCK).float())


def tail_of_keys(
    k_GMD: Tensor, mask_GM: Tensor | None, clusters: int, iterations: int, subsample: int, start_GKD: Tensor | None
) -> KeyClusters | None:
    """Clusters of keys by their distance; None where `clusters` is 0."""
    if not clusters:
        return None
    groups, keys, _ = k_GMD.shape
    clusters = min(clusters, keys)
    label_GM, centroid_GKD = kmeans(
        k_GMD, clusters, iterations=iterations, subsample=subsample, start_GCD=start_GKD, mask_GN=mask_GM
    )
    # the start of the next plan; the tail itself uses the means of all keys, with their gradients
    place_S = spread(max(clusters, keys // subsample), keys, k_GMD.device)
    centroid_GKD = means(k_GMD.index_select(1, place_S), label_GM.index_select(1, place_S), centroid_GKD)
    flat = label_GM + torch.arange(groups, device=k_GMD.device)[:, None] * (clusters + 1)
    size_GK = torch.bincount(flat.flatten(), minlength=groups * (clusters + 1)).view(groups, -1)[:, :clusters]
    return KeyClusters(label_GM, centroid_GKD, size_GK)


def mean_square(q_GND: Tensor) -> Tensor:
    """The mean square of a channel of a query, by head (G,)."""
    return torch.linalg.vector_norm(q_GND, dim=(1, 2)).square() / max(1, q_GND[0].numel())


def lost_variance(k_GMD: Tensor, tail: KeyClusters, square_G: Tensor, scale: float) -> Tensor:
    """The variance of each key's score around that of its mean (G, M), for queries of mean square `square_G` in all directions.

    A mean stands for the keys that are dropped, so a key near it loses little by being dropped, however probable it is: to first order
    the differences from the mean cancel, and about its probability times this variance is lost. 1 where a key is not finite.
    """
    first_G1 = torch.arange(len(k_GMD), device=k_GMD.device)[:, None] * tail.clusters
    row_GM = tail.label_GM.clamp(max=tail.clusters - 1) + first_G1  # masked keys have no cluster, and no probability
    away_GMD = k_GMD - torch.nn.functional.embedding(row_GM, tail.centroid_GKD.flatten(0, 1))
    variance_GM = torch.linalg.vector_norm(away_GMD, dim=-1).square_() * (square_G * scale**2)[:, None]
    return variance_GM.clamp_(min=_LEAST_VARIANCE).nan_to_num(nan=1.0, posinf=1.0)


def _spread_covariance(k_GMD: Tensor, mask_GM: Tensor | None, subsample: int) -> Tensor:
    """Covariance of one key in `subsample`; of all where there are few."""
    keys, width = k_GMD.shape[1:]
    stride = max(1, min(subsample, keys // (16 * width)))
    if stride == 1:
        return covariance(k_GMD, mask_GM)
    place = spread(keys // stride, keys, k_GMD.device)
    return covariance(k_GMD.index_select(1, place), None if mask_GM is None else mask_GM.index_select(1, place))
