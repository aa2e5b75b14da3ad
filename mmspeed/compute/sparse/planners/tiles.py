"""A planner by position: tiles of neighbours in time, height and width attend to whole tiles.

After VSA (Video Sparse Attention, 2025): the mean query of a tile scores the mean keys of all tiles. Tiles are the same for all heads,
so that kernels of whole blocks support these plans.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters (tiles) of queries, R tiles of keys, X position axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterPlan, TailClusters, Tiles

from .clusters import group_mask, inputs
from .csr import KeyListBuilder, blocks, flat_lists
from .kmeans import sums
from .selection import KeepRule, KeyMasks, PlannerContext
from .topk import tau_of_share


@dataclass(frozen=True)
class Tiling:
    """The tile of each token; tiles without tokens have no number."""

    tile_N: Tensor  # int64
    coords_RX: Tensor  # int64, of each tile among tiles; -1 on all axes for the one of tokens without a place, the last

    @property
    def count(self) -> int:
        """Number of tiles, R."""
        return len(self.coords_RX)


def tiling(positions_NX: Tensor, tile: Sequence[int]) -> Tiling:
    """Tiles of tokens by position, in raster order; edge tiles are smaller. Tokens of a negative position are one more tile, the last.

    Raises ValueError for a tile with another number of axes.
    """
    if positions_NX.dim() != 2 or positions_NX.shape[1] != len(tile):
        raise ValueError(f"tiles {tuple(tile)} do not fit positions of the shape {tuple(positions_NX.shape)}")
    if min(tile) < 1:
        raise ValueError(f"tiles {tuple(tile)} are positive")
    positions_NX = positions_NX.long()
    nowhere_N = (positions_NX < 0).any(dim=1)
    coords_NX = positions_NX.clamp(min=0).div(torch.tensor(tile, device=positions_NX.device), rounding_mode="floor")
    code_N = torch.zeros_like(nowhere_N, dtype=torch.int64)
    for axis in range(len(tile)):
        code_N = code_N * (coords_NX[:, axis].max() + 1) + coords_NX[:, axis]
    code_N = torch.where(nowhere_N, code_N.max() + 1, code_N)
    coords_NX = coords_NX.masked_fill(nowhere_N[:, None], -1)
    codes, tile_N = code_N.unique(return_inverse=True)
    coords_RX = torch.empty(len(codes), len(tile), dtype=torch.int64, device=tile_N.device)
    coords_RX[tile_N] = coords_NX  # all tokens of a tile write the same
    return Tiling(tile_N, coords_RX)


@dataclass(frozen=True)
class TiledInputs:
    """Queries and keys of a call in tiles."""

    shape: tuple[int, int, int, int]  # B, A, N, M
    masks: KeyMasks
    queries: Tiling | None  # of the queries that choose; None: there is none
    keys: Tiling
    label_GM: Tensor  # tile of each key; R at masked keys
    size_GR: Tensor  # keys of each tile that are seen, int64
    forced_GR: Tensor  # tiles with a key that is always kept

    @property
    def groups(self) -> int:
        """Number of heads in the batch, G."""
        return len(self.size_GR)

    @property
    def choosing(self) -> int:
        """Tiles of queries that choose."""
        return 0 if self.queries is None else self.queries.count


def tile_inputs(
    q_BAND: Tensor, k_BAMD: Tensor, context: PlannerContext, tile: Sequence[int]
) -> tuple[Tensor, Tensor, TiledInputs]:
    """Queries, keys and their tiles (q_GND, k_GMD, tiles). Raises ValueError for missing positions and those that do not fit."""
    q_GND, k_GMD, masks = inputs(q_BAND, k_BAMD, context)
    queries, keys = q_GND.shape[1], k_GMD.shape[1]
    places_NX = context.positions_NX
    places_MX = places_NX if context.key_positions_MX is None else context.key_positions_MX
    if places_NX is None or places_MX is None:
        raise ValueError("tiles need the positions of the queries")
    if len(places_NX) != queries or len(places_MX) != keys:
        raise ValueError(
            f"{len(places_NX)} and {len(places_MX)} positions are not of {queries} queries and {keys} keys"
        )
    places_NX, places_MX = places_NX.to(q_GND.device), places_MX.to(q_GND.device)
    of_keys = tiling(places_MX, tile)
    if masks.choosing is not None:
        places_NX = places_NX[masks.choosing]
    of_queries = tiling(places_NX, tile) if len(places_NX) else None
    groups = len(q_GND)
    label_GM = of_keys.tile_N.expand(groups, -1)
    mask_GM = group_mask(masks)
    if mask_GM is not None:
        label_GM = label_GM.masked_fill(~mask_GM, of_keys.count)
    counted = (label_GM + torch.arange(groups, device=label_GM.device)[:, None] * (of_keys.count + 1)).flatten()
    size_GR = torch.bincount(counted, minlength=groups * (of_keys.count + 1)).view(groups, -1)[:, : of_keys.count]
    forced_GR = torch.zeros_like(size_GR, dtype=torch.bool)
    if masks.always_BM is not None:
        always_GM = masks.always_BM.repeat_interleave(masks.heads, dim=0)
        hits = torch.bincount(counted[always_GM.flatten()], minlength=groups * (of_keys.count + 1))
        forced_GR = hits.view(groups, -1)[:, : of_keys.count] > 0
    batch, heads = q_BAND.shape[:2]
    shape = (batch, heads, queries, keys)
    return q_GND, k_GMD, TiledInputs(shape, masks, of_queries, of_keys, label_GM.contiguous(), size_GR, forced_GR)


def plan_tiles(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    keep: KeepRule,
    context: PlannerContext,
    *,
    tile: Sequence[int] = (4, 4, 4),
    tail: bool = False,
) -> ClusterPlan:
    """A plan by tiles of positions, without gradients. Tiles of queries are clusters, and whole tiles of keys are kept.

    Args:
        keep: applied to tiles: a key's probability is that of its tile divided by its number of keys; "top" takes the number of tiles
            whose keys are nearest to the share. A tile with an always-kept key is always kept.
        context: with positions.
        tile: tokens along each axis of the positions.
        tail: also clusters of keys, the tiles, for tail="summary".

    Raises ValueError for shapes that do not fit.
    """
    with torch.no_grad(), torch.autocast(q_BAND.device.type, enabled=False):
        q_GND, k_GMD, tiled = tile_inputs(q_BAND, k_BAMD, context, tile)
        masks = tiled.masks
        groups, rows, count = tiled.groups, tiled.choosing, tiled.keys.count
        kept_GCR = torch.zeros(groups, rows, count, dtype=torch.bool, device=q_GND.device)
        tau_G = torch.zeros(groups, device=q_GND.device)
        if tiled.queries is not None:
            some_GND = q_GND if masks.choosing is None else q_GND.index_select(1, masks.choosing)
            total, number_GC = sums(some_GND, tiled.queries.tile_N.expand(groups, -1), rows)
            scale = q_BAND.shape[-1] ** -0.5 if context.scale is None else context.scale
            mean_GCD = total * (scale / number_GC[..., None])
            mean_GRD = sums(k_GMD, tiled.label_GM, count)[0] / tiled.size_GR.clamp(min=1)[..., None]
            kept_GCR, tau_G = _choose_tiles(mean_GCD @ mean_GRD.mT, number_GC, keep, tiled, context)
        plan = plan_of_tiles(tiled, kept_GCR, tail, tau_G if keep.rule in ("threshold", "fraction") else None)
    return plan


def _choose_tiles(
    score_GCR: Tensor, weight_GC: Tensor, keep: KeepRule, tiled: TiledInputs, context: PlannerContext
) -> tuple[Tensor, Tensor]:
    """The kept tiles and the thresholds, (kept_GCR, tau_G)."""
    masks, heads = tiled.masks, tiled.masks.heads
    size_G1R, forced_G1R = tiled.size_GR[:, None], tiled.forced_GR[:, None]
    seen_G11 = masks.count(slice(0, tiled.groups))
    here_G1R = size_G1R > 0
    # log of (probability of one key x keys seen)
    x_GCR = (score_GCR + size_G1R.log()).masked_fill_(~here_G1R, -torch.inf).log_softmax(dim=-1)
    x_GCR += seen_G11.clamp(min=1).log() - size_G1R.clamp(min=1).log()
    # a NaN score makes its whole row NaN: all tiles are kept, and the NaN appears in the output as in that of dense attention
    lost_GC1 = x_GCR.isnan().any(dim=-1, keepdim=True)
    x_GCR = x_GCR.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if context.observe is not None:
        _observe(context, x_GCR, weight_GC, tiled)
    tau_G = torch.full((tiled.groups,), keep.value if keep.rule == "threshold" else 0.0, device=x_GCR.device)
    if keep.rule == "fraction":
        pairs_GCR = weight_GC[..., None] * size_G1R
        ranked_GCR = x_GCR.masked_fill(forced_G1R, torch.inf)
        for start in range(0, tiled.groups, heads):
            one = slice(start, start + heads)
            tau_G[one] = tau_of_share(ranked_GCR[one], pairs_GCR[one], keep.value)
    # the most probable first, in the order of the scores within a row; forced tiles come first, empty ones last
    low = torch.finfo(score_GCR.dtype).min
    rank_GCR = score_GCR.nan_to_num(nan=low, posinf=torch.inf, neginf=low).masked_fill_(forced_G1R, torch.inf)
    order_GCR = rank_GCR.masked_fill_(~here_G1R, -torch.inf).sort(dim=-1, descending=True, stable=True).indices

    def ordered(per_tile_GR: Tensor) -> Tensor:
        return per_tile_GR.expand_as(order_GCR).gather(-1, order_GCR)

    x, size, forced = x_GCR.gather(-1, order_GCR), ordered(size_G1R), ordered(forced_G1R)
    upto = size.cumsum(dim=-1)
    if keep.rule == "top":
        taken = upto - 0.5 * size <= seen_G11 * keep.value
    elif keep.rule == "mass":
        p = x.exp() * size / seen_G11.clamp(min=1)
        taken = p.cumsum(dim=-1) - p < keep.value
    else:
        taken = x >= tau_G.to(x.dtype).log()[:, None, None]
    if keep.at_most < 1.0:
        cap = (seen_G11 * keep.at_most).floor().clamp(min=keep.at_least)
        taken &= (size * ~forced).cumsum(dim=-1) <= cap
    taken |= upto - size < keep.at_least
    taken |= forced
    taken |= lost_GC1
    taken &= size > 0
    return torch.zeros_like(taken).scatter_(-1, order_GCR, taken), tau_G


def _observe(context: PlannerContext, x_GCR: Tensor, weight_GC: Tensor, tiled: TiledInputs) -> None:
    """Call the observer with the shares of all keys, each that of its tile."""
    assert context.observe is not None
    masks = tiled.masks
    for g, c in blocks(tiled.groups, tiled.choosing, masks.keys, x_GCR.device):
        share_gcM = x_GCR[g, c].exp().index_select(-1, tiled.keys.tile_N)
        always, seen = masks.always(g), masks.seen(g)
        if always is not None:
            share_gcM.masked_fill_(always, torch.inf)
        if seen is not None:
            share_gcM.masked_fill_(~seen, -1.0)
        context.observe(share_gcM, weight_GC[g, c], g)


def plan_of_tiles(tiled: TiledInputs, kept_GCR: Tensor, tail: bool, tau_G: Tensor | None = None) -> ClusterPlan:
    """The plan in which tiles of queries keep tiles of keys; the full queries, after them, keep all."""
    masks, groups, device = tiled.masks, tiled.groups, kept_GCR.device
    if masks.full_F is not None:
        kept_GCR = torch.cat((kept_GCR, torch.ones_like(tiled.forced_GR)[:, None]), dim=1)
    lists = KeyListBuilder(groups, kept_GCR.shape[1], masks.keys, device)
    for g, c in blocks(groups, kept_GCR.shape[1], masks.keys, device):
        keep_gcM = kept_GCR[g, c].index_select(-1, tiled.keys.tile_N)
        seen = masks.seen(g)
        lists.add(g, c, *flat_lists(keep_gcM if seen is None else keep_gcM & seen))
    key_lists = lists.finish(tau_G)
    q_index_N, q_offsets_C = _by_tile(tiled)
    return ClusterPlan(
        *tiled.shape,
        q_index_GN=q_index_N.expand(groups, -1).contiguous(),
        q_offsets_GC=q_offsets_C.expand(groups, -1).contiguous(),
        kv_index_Z=key_lists.kv_index_Z,
        kv_offsets=key_lists.kv_offsets,
        tail=TailClusters(tiled.label_GM, tiled.keys.count, (tiled.size_GR[:, None] * ~kept_GCR).float())
        if tail
        else None,
        tiles=Tiles(tiled.keys.tile_N.sort(stable=True).indices, _offsets(tiled.keys), kept_GCR),
        tau_G=tau_G,
    )


def _by_tile(tiled: TiledInputs) -> tuple[Tensor, Tensor]:
    """The order and offsets of queries by tile, (q_index_N, q_offsets_C)."""
    masks, queries = tiled.masks, tiled.shape[2]
    if tiled.queries is None:
        assert masks.full_F is not None
        return masks.full_F, torch.tensor([0, queries], device=masks.full_F.device)
    index_N, offsets_C = tiled.queries.tile_N.sort(stable=True).indices, _offsets(tiled.queries)
    if masks.full_F is not None and masks.choosing is not None:
        index_N = torch.cat((masks.choosing[index_N], masks.full_F))
        offsets_C = torch.cat((offsets_C, torch.full_like(offsets_C[:1], queries)))
    return index_N, offsets_C


def _offsets(tiles: Tiling) -> Tensor:
    return torch.nn.functional.pad(torch.bincount(tiles.tile_N, minlength=tiles.count).cumsum(dim=0), (1, 0))
