"""Planners with patterns that do not depend on the contents of queries and keys, for comparison.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, R tiles of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterPlan

from .clusters import group_mask, inputs, sort_queries, tail_of_keys, with_full
from .csr import KeyListBuilder, blocks, flat_lists
from .selection import PlannerContext
from .tiles import plan_of_tiles, tile_inputs


def plan_window(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    context: PlannerContext,
    *,
    tile: Sequence[int],
    window: Sequence[int] = (3, 3, 3),
    tail: bool = False,
) -> ClusterPlan:
    """A plan in which a tile of queries keeps the tiles of keys around it (after STA, Sliding Tile Attention, 2025), fewer at edges.

    Args:
        context: with positions. Queries without a place keep every key; keys without one are kept only by `always_keep`.
        window: tiles along each axis, odd: half of it on either side.

    A tile that sees masked keys alone keeps the nearest tile with a key that counts. Raises ValueError for shapes that do not fit.
    """
    if len(window) != len(tile) or any(size < 1 or size % 2 == 0 for size in window):
        raise ValueError(f"a window {tuple(window)} is odd along each axis of the tiles {tuple(tile)}")
    with torch.no_grad():
        _, _, tiled = tile_inputs(q_BAND, k_BAMD, context, tile)
        here_G1R = tiled.size_GR[:, None] > 0
        if tiled.queries is None:
            kept_GCR = here_G1R[:, :0]
        else:
            at_CX, of_RX = tiled.queries.coords_RX, tiled.keys.coords_RX
            far_CRX = (at_CX[:, None] - of_RX[None]).abs()
            half = torch.tensor(window, device=far_CRX.device) // 2
            placed_R = (of_RX >= 0).all(dim=1)
            near_CR = (far_CRX <= half).all(dim=-1) & placed_R
            near_CR |= (at_CX < 0).all(dim=1)[:, None]
            kept_GCR = (near_CR | tiled.forced_GR[:, None]) & here_G1R
            far_CR = far_CRX.sum(dim=-1) + (~placed_R) * far_CRX.sum(dim=-1).max().add(1)
            far_GCR = torch.where(here_G1R, far_CR, torch.iinfo(torch.int64).max)
            nearest_GC1 = far_GCR.min(dim=-1, keepdim=True).indices
            none_GC1 = ~kept_GCR.any(dim=-1, keepdim=True)
            rescue_GCR = torch.zeros_like(kept_GCR).scatter_(-1, nearest_GC1, none_GC1)
            kept_GCR = kept_GCR | (rescue_GCR & here_G1R)
        return plan_of_tiles(tiled, kept_GCR, tail)


def plan_skip(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    context: PlannerContext | None = None,
    *,
    stride: int = 4,
    way: Literal[0, 1] = 0,
    tail_clusters: int = 0,
    tail_start_GKD: Tensor | None = None,
    iterations: int = 3,
    subsample: int = 4,
) -> ClusterPlan:
    """A plan in which tokens attend to every `stride`-th one (Skiparse of Open-Sora Plan 1.3, 2024); blocks alternate between two ways.

    Args:
        way: 0: token i is in group i % stride; 1: in group i // stride % stride. With full queries (text), i counts the other tokens,
            among the keys too where there are as many keys as queries.
        tail_clusters, tail_start_GKD, iterations, subsample: as in `plan_clusters`.

    A group with masked keys alone keeps the first key that counts. Raises ValueError for shapes that do not fit.
    """
    if stride < 1 or way not in (0, 1):
        raise ValueError(f"stride {stride} is positive, way {way} is 0 or 1")
    context = PlannerContext() if context is None else context
    with torch.no_grad(), torch.autocast(q_BAND.device.type, enabled=False):
        q_GND, k_GMD, masks = inputs(q_BAND, k_BAMD, context)
        groups, queries, keys, device = len(q_GND), q_GND.shape[1], k_GMD.shape[1], q_GND.device
        choosing = queries if masks.choosing is None else len(masks.choosing)
        label_N = skip_group(torch.arange(choosing, device=device), stride, way)
        place_M = torch.arange(keys, device=device)
        if masks.choosing is not None and keys == queries:
            place_M = torch.full_like(place_M, -1)
            place_M[masks.choosing] = torch.arange(choosing, device=device)
        label_M = torch.where(place_M >= 0, skip_group(place_M, stride, way), -1)
        size_C = torch.bincount(label_N, minlength=stride)
        first_M = torch.arange(keys, device=device) == 0
        tail = tail_of_keys(k_GMD, group_mask(masks), tail_clusters, iterations, subsample, tail_start_GKD)
        rows = stride + (masks.full_F is not None)
        lists = KeyListBuilder(
            groups, rows, keys, device, None if tail is None else tail.label_GM, 0 if tail is None else tail.clusters
        )
        for g, c in blocks(groups, rows, keys, device):
            row_c = torch.arange(c.start, c.stop, device=device)
            keep_gcM = (label_M == row_c[:, None]).expand(g.stop - g.start, -1, -1).clone()
            always, seen = masks.always(g), masks.seen(g)
            if always is not None:
                keep_gcM |= always
            if seen is not None:
                keep_gcM &= seen
            none_gc1 = ~keep_gcM.any(dim=-1, keepdim=True)
            keep_gcM |= none_gc1 & (first_M if seen is None else seen & (seen.cumsum(dim=-1) == 1))
            keep_gcM &= (torch.nn.functional.pad(size_C, (0, 1)) > 0)[c, None]
            if c.stop > stride:
                keep_gcM[:, -1:] = True if seen is None else seen
            lists.add(g, c, *flat_lists(keep_gcM))
        key_lists = lists.finish()
        q_index_GN, q_offsets_GC = with_full(*sort_queries(label_N.expand(groups, -1), stride), masks)
    batch, heads, queries, _ = q_BAND.shape
    return ClusterPlan(
        batch,
        heads,
        queries,
        keys=keys,
        q_index_GN=q_index_GN,
        q_offsets_GC=q_offsets_GC,
        kv_index_Z=key_lists.kv_index_Z,
        kv_offsets=key_lists.kv_offsets,
        tail=None if tail is None else tail.plan(key_lists),
        tail_centroids_GKD=None if tail is None else tail.centroid_GKD,
    )


def skip_group(place: Tensor, stride: int, way: int) -> Tensor:
    """The group of the tokens at these places of a sequence, of `stride` groups."""
    return (place if way == 0 else place.div(stride, rounding_mode="floor")) % stride
