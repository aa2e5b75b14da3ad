"""Planners of sparse attention: what every plan holds, what each is for, and inputs that are odd.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys, R tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterPlan
from mmspeed.compute.sparse.planners.clusters import plan_clusters
from mmspeed.compute.sparse.planners.kmeans import covariance, kmeans, spread
from mmspeed.compute.sparse.planners.patterns import plan_skip, plan_window
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.compute.sparse.planners.tiles import plan_tiles, tiling
from mmspeed.compute.sparse.planners.topk import largest


def draw(*shape: int, seed: int = 0) -> Tensor:
    return rng.normal(shape, seed, "planners", *shape)


def grid(*sizes: int) -> Tensor:
    return torch.cartesian_prod(*[torch.arange(size) for size in sizes]).view(-1, len(sizes))


def same(one: ClusterPlan, other: ClusterPlan) -> bool:
    names = ("q_index_GN", "q_offsets_GC", "kv_index_Z", "kv_offsets")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def kept_pairs(plan: ClusterPlan) -> Tensor:
    return plan.kept_mask().flatten(0, 1)


def holds(plan: ClusterPlan, keys: int, context: PlannerContext, batch: int, heads: int, at_least: int = 1) -> None:
    """Check the invariants of every plan."""
    plan.check()
    groups = batch * heads
    seen_GM = torch.ones(groups, keys, dtype=torch.bool)
    if context.key_mask_BM is not None:
        seen_GM = context.key_mask_BM.repeat_interleave(heads, dim=0)
    kept_GCM, busy_GC = plan.kept_keys(), plan.sizes() > 0
    assert not (kept_GCM & ~seen_GM[:, None]).any(), "a masked key is kept"
    assert not kept_GCM[~busy_GC].any(), "an empty cluster keeps keys"
    least_G1 = seen_GM.sum(dim=1, keepdim=True).clamp(max=at_least)
    assert (plan.lengths() >= least_G1)[busy_GC].all(), "a cluster keeps too few keys"
    if context.always_keep is not None:
        always_GM = context.always_keep.expand(batch, keys).repeat_interleave(heads, dim=0) & seen_GM
        assert kept_GCM[(always_GM[:, None] & busy_GC[..., None])].all(), "a key that is always kept is dropped"
    if context.full_queries_N is not None and context.full_queries_N.any():
        full_N = context.full_queries_N
        assert (plan.cluster_of_query()[:, full_N] == plan.clusters - 1).all()
        assert plan.sizes()[0, -1] == full_N.sum() and torch.equal(kept_GCM[:, -1], seen_GM)
    if plan.tail is not None:
        label_GM, clusters = plan.tail.label_GM, plan.tail.clusters
        assert torch.equal(label_GM == clusters, ~seen_GM), "masked keys, and no others, have no cluster"
        dropped_GCM = ~kept_GCM & seen_GM[:, None]
        label_GCM = label_GM[:, None].expand_as(dropped_GCM)
        counts = torch.zeros(groups, plan.clusters, clusters + 1).scatter_add_(2, label_GCM, dropped_GCM.float())
        assert torch.equal(counts[..., :clusters], plan.tail.dropped_GCK)
    if plan.tiles is not None:
        tiles = plan.tiles
        assert torch.equal(tiles.key_index_M.sort().values, torch.arange(keys))
        tile_of_M = torch.empty(keys, dtype=torch.long)
        tile_of_M[tiles.key_index_M] = torch.repeat_interleave(
            torch.arange(len(tiles.key_offsets_R) - 1), tiles.key_offsets_R.diff()
        )
        assert torch.equal(tiles.kept_GCR[..., tile_of_M] & seen_GM[:, None], kept_GCM)


@st.composite
def cases(pick: st.DrawFn) -> tuple[Tensor, Tensor, PlannerContext, KeepRule]:
    batch, heads, width = pick(st.integers(1, 2)), pick(st.integers(1, 2)), pick(st.sampled_from((1, 4, 8)))
    sizes = pick(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)))
    text, seed = pick(st.integers(0, 3)), pick(st.integers(0, 99))
    positions = torch.cat((grid(*sizes), torch.full((text, 3), -1)))
    tokens = len(positions)
    dtype = pick(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    q, k = (draw(batch, heads, tokens, width, seed=seed + 100 * part).to(dtype) * 2 for part in range(2))
    kind = pick(st.sampled_from(("plain", "plain", "equal", "twice")))
    if kind == "equal":
        q, k = torch.ones_like(q), torch.zeros_like(k)
    elif kind == "twice":
        q, k = q[:, :, torch.arange(tokens) // 2], k[:, :, torch.arange(tokens) // 2]
    dice = torch.Generator().manual_seed(seed)

    def luck(share: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=dice) < share

    mask = luck(pick(st.sampled_from((0.0, 0.3, 0.8))), batch, tokens) if pick(st.booleans()) else None
    always = luck(0.2, tokens) if pick(st.booleans()) else None
    full = positions[:, 0] < 0 if pick(st.booleans()) else luck(pick(st.sampled_from((0.2, 1.0))), tokens)
    full = full if pick(st.booleans()) else None
    rule = pick(st.sampled_from(("threshold", "fraction", "mass", "top")))
    value = pick(st.sampled_from((0.0, 0.5, 1.0, 1.5, 1e9))) if rule == "threshold" else pick(st.floats(0.01, 1.0))
    keep = KeepRule(
        rule, value, at_least=pick(st.sampled_from((1, 3, 1000))), at_most=pick(st.sampled_from((0.2, 1.0)))
    )
    return q, k, PlannerContext(mask, always, full, positions), keep


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_every_plan_holds_what_plans_hold(
    case: tuple[Tensor, Tensor, PlannerContext, KeepRule], data: st.DataObject
) -> None:
    q, k, context, keep = case
    batch, heads, tokens, _ = q.shape
    tile = data.draw(st.sampled_from(((1, 1, 1), (2, 2, 2), (1, 3, 2), (9, 9, 9))))
    size, tail = data.draw(st.sampled_from((1, 2, 7, 1000))), data.draw(st.sampled_from((0, 1, 4, 1000)))
    metric = data.draw(st.sampled_from(("logit", "euclid")))
    iterations, subsample = data.draw(st.integers(0, 2)), data.draw(st.sampled_from((1, 4)))
    plan = plan_clusters(
        q,
        k,
        keep,
        context,
        cluster_size=size,
        metric=metric,
        iterations=iterations,
        subsample=subsample,
        tail_clusters=tail,
    )
    holds(plan, tokens, context, batch, heads, keep.at_least)
    if keep.rule in ("threshold", "fraction") and keep.at_least == 1 and context.always_keep is None:
        seen_G1 = torch.full((batch * heads, 1), tokens)
        if context.key_mask_BM is not None:
            seen_G1 = context.key_mask_BM.sum(dim=1).repeat_interleave(heads)[:, None]
        most = (seen_G1 * keep.at_most).floor().clamp(min=1)
        choose = plan.clusters - (context.full_queries_N is not None and bool(context.full_queries_N.any()))
        assert (plan.lengths()[:, :choose] <= most).all()
    tiles = plan_tiles(q, k, keep, context, tile=tile, tail=bool(tail))
    holds(tiles, tokens, context, batch, heads, keep.at_least)
    holds(plan_window(q, k, context, tile=tile, window=(1, 3, 3), tail=bool(tail)), tokens, context, batch, heads)
    way = data.draw(st.sampled_from((0, 1)))
    holds(plan_skip(q, k, context, stride=3, way=way, tail_clusters=tail), tokens, context, batch, heads)


def test_the_logit_metric_is_that_of_centred_rows_of_scores() -> None:
    q, k = draw(1, 2, 60, 8).double(), draw(1, 2, 50, 8, seed=1).double() * torch.linspace(0.1, 3, 8) + 5
    mask_BM = torch.arange(50)[None] % 7 != 3
    plan = plan_clusters(q, k, KeepRule("top", 0.5), PlannerContext(key_mask_BM=mask_BM), cluster_size=6, subsample=1)
    rows_GNM = (q @ k[:, :, mask_BM[0]].mT)[0]
    rows_GNM = rows_GNM - rows_GNM.mean(dim=-1, keepdim=True)
    centres_GCM = rows_GNM[:, spread(10, 60, q.device)]
    for step in range(4):
        label_GN = torch.cdist(rows_GNM, centres_GCM, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=-1)
        if step == 3:
            break
        one_hot_GNC = torch.nn.functional.one_hot(label_GN, 10).double()
        count_GC1 = one_hot_GNC.sum(dim=1)[..., None]
        centres_GCM = torch.where(count_GC1 > 0, one_hot_GNC.mT @ rows_GNM / count_GC1.clamp(min=1), centres_GCM)
    assert torch.equal(plan.cluster_of_query(), label_GN)
    euclid = plan_clusters(
        q, k, KeepRule("top", 0.5), PlannerContext(key_mask_BM=mask_BM), cluster_size=6, metric="euclid"
    )
    assert not torch.equal(euclid.cluster_of_query(), label_GN)


@pytest.mark.parametrize("rule,value", [("threshold", 1e12), ("fraction", 0.05), ("mass", 0.5), ("top", 0.05)])
def test_odd_scores_leave_a_plan_that_holds(rule: str, value: float) -> None:
    keep = KeepRule(rule, value)  # type: ignore[arg-type]
    context = PlannerContext(positions_NX=grid(2, 4, 5), key_mask_BM=torch.arange(40)[None] >= 3)
    for fill in (float("inf"), float("-inf"), float("nan"), 1e30):
        for where in ("one key", "one query", "all"):
            q, k = draw(1, 2, 40, 4), draw(1, 2, 40, 4, seed=1)
            k[:, :, :3] = torch.nan  # masked
            if where == "one key":
                k[:, :, 7] = fill
            elif where == "one query":
                q[:, :, 7] = fill
            else:
                q[:], k[:] = fill, fill
            holds(plan_clusters(q, k, keep, context, cluster_size=4, tail_clusters=3), 40, context, 1, 2)
            holds(plan_tiles(q, k, keep, context, tile=(1, 2, 2), tail=True), 40, context, 1, 2)


def test_the_same_inputs_give_the_same_bits_and_samples_do_not_meet() -> None:
    q, k = draw(2, 2, 300, 8) * 2, draw(2, 2, 300, 8, seed=1)
    context = PlannerContext(positions_NX=grid(3, 10, 10))
    makers: list[Callable[[Tensor, Tensor], ClusterPlan]] = [
        lambda q, k: plan_clusters(q, k, KeepRule("fraction", 0.1), cluster_size=20, tail_clusters=4),
        lambda q, k: plan_clusters(q, k, KeepRule("mass", 0.4), cluster_size=20, tail_clusters=4),
        lambda q, k: plan_tiles(q, k, KeepRule("fraction", 0.1), context, tail=True),
    ]
    for make in makers:
        plan = make(q, k)
        assert same(plan, make(q.clone(), k.clone()))
        other = make(torch.cat((q[:1], 5 * q[1:])), torch.cat((k[:1], k[1:].flip(2))))
        assert torch.equal(kept_pairs(plan)[:2], kept_pairs(other)[:2])
        assert plan.tail is not None and other.tail is not None
        assert torch.equal(plan.tail.label_GM[:2], other.tail.label_GM[:2])
        wide = make(q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(1, 2).contiguous().transpose(1, 2))
        assert same(plan, wide), "views are served like what they show"
        assert not plan.kv_index_Z.requires_grad


def test_a_warm_start_finds_the_same_clusters_without_iterations() -> None:
    q, k = draw(1, 2, 512, 8) * 2, draw(1, 2, 512, 8, seed=1)
    keep = KeepRule("fraction", 0.1)
    cold = plan_clusters(q, k, keep, cluster_size=32, iterations=25, subsample=1, tail_clusters=8)
    warm = plan_clusters(
        q,
        k,
        keep,
        cluster_size=32,
        iterations=0,
        start_GCD=cold.centroids_GCD,
        tail_clusters=8,
        tail_start_GKD=cold.tail_centroids_GKD,
    )
    alike = (cold.cluster_of_query() == warm.cluster_of_query()).float().mean()
    assert alike > 0.9 and cold.tail is not None and warm.tail is not None
    assert (cold.tail.label_GM == warm.tail.label_GM).float().mean() > 0.8
    raw = plan_clusters(q, k, keep, cluster_size=32, iterations=0)
    assert (cold.cluster_of_query() == raw.cluster_of_query()).float().mean() < 0.8
    for wrong in ({"start_GCD": cold.centroids_GCD[:, :-1]}, {"tail_start_GKD": cold.tail_centroids_GKD[:1]}):
        with pytest.raises(ValueError, match="centroids of the shape"):
            plan_clusters(q, k, keep, cluster_size=32, tail_clusters=8, **wrong)


def test_tiles_are_neighbours_in_raster_order_with_smaller_ones_at_edges() -> None:
    tiles = tiling(torch.cat((grid(3, 5, 4), torch.tensor([[-1, -1, -1]]))), (2, 3, 4))
    assert tiles.count == 5 and tiles.coords_RX[-1].tolist() == [-1, -1, -1]
    assert tiles.coords_RX[:-1].tolist() == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert tiles.tile_N.bincount().tolist() == [24, 16, 12, 8, 1]
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    again = tiling(grid(3, 5, 4)[shuffled], (2, 3, 4))
    assert torch.equal(again.tile_N, tiles.tile_N[:60][shuffled])


def test_tiles_keep_what_the_mean_query_scores_highest() -> None:
    positions = grid(2, 4, 4)
    q, k = draw(1, 1, 32, 8) * 4, draw(1, 1, 32, 8, seed=1)
    plan = plan_tiles(q, k, KeepRule("top", 0.5), PlannerContext(positions_NX=positions), tile=(1, 2, 2), tail=True)
    tile_N = tiling(positions, (1, 2, 2)).tile_N
    member = torch.nn.functional.one_hot(tile_N).float().mT / 4
    score_CR = (member @ q[0, 0]) @ (member @ k[0, 0]).mT
    assert plan.tiles is not None
    kept_CR = plan.tiles.kept_GCR[0]
    assert torch.equal(kept_CR, largest(score_CR, torch.full((8,), 4)))
    mass = plan_tiles(q, k, KeepRule("mass", 0.6), PlannerContext(positions_NX=positions), tile=(1, 2, 2)).tiles
    assert mass is not None
    p_CR = (score_CR * 8**-0.5).softmax(dim=-1)
    assert ((p_CR * mass.kept_GCR[0]).sum(dim=-1) >= 0.6 - 1e-5).all()
    limited = plan_tiles(
        q, k, KeepRule("mass", 0.99, at_most=0.25), PlannerContext(positions_NX=positions), tile=(1, 2, 2)
    )
    assert limited.lengths().max() <= 8


def test_keys_may_have_other_places_than_queries() -> None:
    q, k = draw(1, 1, 16, 4), draw(1, 1, 24, 4, seed=1)
    context = PlannerContext(positions_NX=grid(1, 4, 4), key_positions_MX=grid(2, 3, 4))
    plan = plan_tiles(q, k, KeepRule("top", 0.5), context, tile=(1, 2, 2), tail=True)
    assert plan.clusters == 4 and plan.tail is not None and plan.tail.clusters == 8
    holds(plan, 24, context, 1, 1)
    with pytest.raises(ValueError, match="positions"):
        plan_tiles(q, k, KeepRule("top", 0.5), PlannerContext(positions_NX=grid(1, 4, 4)))
    with pytest.raises(ValueError, match="positions"):
        plan_tiles(q, k, KeepRule("top", 0.5), PlannerContext())
    with pytest.raises(ValueError, match="do not fit positions"):
        plan_tiles(q, k, KeepRule("top", 0.5), context, tile=(2, 2))


def test_a_window_keeps_the_tiles_around() -> None:
    positions = grid(2, 6, 6)
    q = k = draw(1, 1, 72, 4)
    plan = plan_window(q, k, PlannerContext(positions_NX=positions), tile=(1, 2, 2), window=(1, 3, 3), tail=True)
    far = (positions[:, None] // torch.tensor([1, 2, 2]) - positions[None] // torch.tensor([1, 2, 2])).abs()
    assert torch.equal(kept_pairs(plan)[0], (far <= torch.tensor([0, 1, 1])).all(dim=-1))
    with pytest.raises(ValueError, match="odd"):
        plan_window(q, k, PlannerContext(positions_NX=positions), tile=(1, 2, 2), window=(2, 3, 3))


def test_skipping_meets_every_stride_th_token() -> None:
    q = k = draw(1, 1, 36, 4)
    place = torch.arange(36)
    for way, group in ((0, place % 3), (1, place // 3 % 3)):
        plan = plan_skip(q, k, stride=3, way=way)  # type: ignore[arg-type]
        assert torch.equal(kept_pairs(plan)[0], group[:, None] == group[None])
    text = place < 4
    q = k = draw(1, 1, 40, 4)
    text = torch.arange(40) < 4
    plan = plan_skip(q, k, PlannerContext(full_queries_N=text, always_keep=text), stride=3, way=1)
    assert torch.equal(kept_pairs(plan)[0, 4:, 4:], group[:, None] == group[None])
    assert kept_pairs(plan)[0, :4].all() and kept_pairs(plan)[0, :, :4].all()


def test_kmeans_leaves_masked_points_out_and_spreads_its_start() -> None:
    x = torch.cat((draw(1, 50, 3), draw(1, 50, 3, seed=1) + 20), dim=1)
    mask = torch.ones(1, 100, dtype=torch.bool)
    clean, centres = kmeans(x, 2, subsample=1)
    assert clean[0, :50].unique().numel() == 1 and clean[0, 50:].unique().numel() == 1 and clean[0, 0] != clean[0, 99]
    x[0, ::9], mask[0, ::9] = 1e6, False
    label, masked_centres = kmeans(x.masked_fill(~mask[..., None], 0.0), 2, subsample=1, mask_GN=mask)
    assert (label[~mask] == 2).all() and torch.equal(label[mask], clean[mask])
    assert (masked_centres - centres).abs().max() < 1
    reference = torch.cov(x[0, mask[0]].mT, correction=0)
    torch.testing.assert_close(covariance(x, mask)[0], reference, rtol=1e-4, atol=1e-4)
    for count, of in ((7, 7), (64, 16384), (3, 1000), (1, 1)):
        places = spread(count, of, torch.device("cpu"))
        assert places.diff().gt(0).all() and 0 <= places[0] and places[-1] < of
    assert spread(64, 16384, torch.device("cpu")).remainder(32).unique().numel() > 16, "not one column of a video"


@pytest.mark.parametrize(
    "problem",
    [
        {"key_mask_BM": torch.ones(1, 9, dtype=torch.bool)},
        {"key_mask_BM": torch.ones(1, 8)},
        {"always_keep": torch.ones(3, 8, dtype=torch.bool)},
        {"full_queries_N": torch.ones(7, dtype=torch.bool)},
    ],
)
def test_masks_that_do_not_fit_are_named(problem: dict[str, Tensor]) -> None:
    q = draw(1, 1, 8, 4)
    with pytest.raises(ValueError, match=next(iter(problem)).split("_")[0]):
        plan_clusters(q, q, KeepRule("top", 0.5), PlannerContext(**problem))
