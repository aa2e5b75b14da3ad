"""Rules of sparse attention: which keys a cluster keeps.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.rope import grid_positions
from mmspeed.compute.sparse import clustered_attention
from mmspeed.compute.sparse.planners.clusters import KeyClusters, lost_variance, mean_square, plan_clusters
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext, Rule
from mmspeed.compute.sparse.planners.tiles import plan_tiles
from mmspeed.compute.sparse.planners.topk import largest, upper_quantile


def draw(*shape: int, seed: int = 0) -> Tensor:
    return rng.normal(shape, seed, "planners", *shape)


def test_kept_keys_are_those_of_a_probability_above_the_threshold() -> None:
    q, k = draw(2, 2, 70, 8) * 2, draw(2, 2, 40, 8, seed=1)
    mask_BM = torch.ones(2, 40, dtype=torch.bool)
    mask_BM[1, 25:] = False
    seen: list[tuple[Tensor, Tensor]] = []
    context = PlannerContext(key_mask_BM=mask_BM, observe=lambda share, weight, groups: seen.append((share, weight)))
    plan = plan_clusters(q, k, KeepRule("threshold", 1.3), context, cluster_size=10)
    member_GCN = torch.nn.functional.one_hot(plan.cluster_of_query(), plan.clusters).float().mT
    centre_GCD = member_GCN @ q.flatten(0, 1) / member_GCN.sum(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(plan.centroids_GCD[plan.sizes() > 0], centre_GCD[plan.sizes() > 0])
    score = (centre_GCD @ k.flatten(0, 1).mT) * 8**-0.5
    p_GCM = score.masked_fill(~mask_BM.repeat_interleave(2, 0)[:, None], -torch.inf).softmax(dim=-1)
    share_GCM = p_GCM * mask_BM.sum(dim=1).repeat_interleave(2)[:, None, None]
    wanted_GCM = share_GCM >= 1.3
    wanted_GCM.scatter_(-1, share_GCM.argmax(dim=-1, keepdim=True), True)
    busy_GC = plan.sizes() > 0
    assert torch.equal(plan.kept_keys()[busy_GC], wanted_GCM[busy_GC])
    share, weight = torch.cat([part for part, _ in seen]), torch.cat([part for _, part in seen])
    assert torch.equal(weight, plan.sizes()) and (share[2:, :, 25:] == -1).all()
    torch.testing.assert_close(share[:2][busy_GC[:2]], share_GCM[:2][busy_GC[:2]])
    assert plan.tau_G is not None and (plan.tau_G == torch.tensor(1.3)).all()


@pytest.mark.parametrize("at_most", [1.0, 0.2])
def test_where_means_stand_for_dropped_keys_a_probability_counts_times_what_they_miss(at_most: float) -> None:
    q, k = draw(2, 2, 70, 8) * 2, draw(2, 2, 40, 8, seed=1)
    mask_BM = torch.arange(40)[None] < torch.tensor([[40], [25]])
    plan = plan_clusters(
        q,
        k,
        KeepRule("threshold", 0.4, at_most=at_most),
        PlannerContext(key_mask_BM=mask_BM),
        cluster_size=10,
        tail_clusters=5,
    )
    assert plan.tail is not None and plan.tail_centroids_GKD is not None and plan.centroids_GCD is not None
    seen_G1M = mask_BM.repeat_interleave(2, 0)[:, None]
    for head in range(4):
        sample, seen_1M = divmod(head, 2), seen_G1M[head]
        query_ND, key_MD = q[sample], k[sample]
        label_M = plan.tail.label_GM[head].clamp(max=4)
        # for queries of the mean square that these have, in every direction
        missed_M = (key_MD - plan.tail_centroids_GKD[head][label_M]).square().sum(1) * query_ND.square().mean() / 8
        score_CM = (plan.centroids_GCD[head] @ key_MD.mT * 8**-0.5).masked_fill(~seen_1M, -torch.inf)
        gain_CM = score_CM.softmax(1) * seen_1M.sum() * missed_M.clamp(min=2.0**-12)
        wanted_CM = gain_CM >= 0.4
        if at_most < 1:
            wanted_CM &= gain_CM.argsort(1, descending=True).argsort(1) < int(at_most * seen_1M.sum())
        wanted_CM.scatter_(1, gain_CM.argmax(1, keepdim=True), True)
        busy_C = plan.sizes()[head] > 0
        assert torch.equal(plan.kept_keys()[head][busy_C], wanted_CM[busy_C])


def test_what_means_miss_is_nothing_of_a_key_that_is_its_mean_and_unknown_of_no_number() -> None:
    k_GMD = torch.tensor([[[1.0, 2.0], [3.0, 2.0], [9.0, 9.0], [torch.nan, 0.0], [0.0, 0.0]]])
    label_GM = torch.tensor([[0, 0, 1, 0, 2]])  # the last is masked
    tail = KeyClusters(label_GM, torch.tensor([[[2.0, 2.0], [9.0, 9.0]]]), torch.tensor([[3, 1]]))
    loss = lost_variance(k_GMD, tail, torch.tensor([4.0]), 0.5)[0]
    assert loss[:4].tolist() == [1.0, 1.0, 2.0**-12, 1.0] and loss[4].isfinite()
    assert mean_square(torch.tensor([[[1.0, 3.0], [2.0, 0.0]]])).tolist() == pytest.approx([3.5])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", [0.03, 0.1, 0.5])
def test_a_fraction_is_met_over_the_heads_of_each_sample(share: float, masked: bool) -> None:
    sharp = torch.tensor([0.3, 1.0, 2.0, 3.0])[:, None, None]
    q, k = draw(2, 4, 1536, 8) * sharp, draw(2, 4, 1400, 8, seed=1)
    mask = torch.arange(1400)[None] < torch.tensor([[1400], [900]]) if masked else None
    plan = plan_clusters(q, k, KeepRule("fraction", share), PlannerContext(key_mask_BM=mask), cluster_size=48)
    seen = torch.tensor([1400, 900 if masked else 1400]) / 1400
    kept_BA = plan.kept_share() / seen[:, None]
    torch.testing.assert_close(kept_BA.mean(dim=1), torch.full((2,), share), atol=2e-3, rtol=0)
    assert kept_BA.std(dim=1).min() > 0.01, "one threshold, not the same share for every head"
    assert plan.tau_G is not None and len(plan.tau_G.unique()) == 2 and (plan.tau_G[:4] == plan.tau_G[0]).all()
    again = plan_clusters(
        q, k, KeepRule("threshold", float(plan.tau_G[0])), PlannerContext(key_mask_BM=mask), cluster_size=48
    ).kept_share()[0]
    torch.testing.assert_close(again, plan.kept_share()[0], atol=1e-4, rtol=0)


def test_mass_and_top_are_per_cluster() -> None:
    q, k = draw(1, 2, 200, 8) * 3, draw(1, 2, 300, 8, seed=1)
    shares: list[Tensor] = []
    context = PlannerContext(observe=lambda share, weight, groups: shares.append(share))
    plan = plan_clusters(q, k, KeepRule("mass", 0.7), context, cluster_size=20)
    p_GCM = torch.cat(shares) / 300
    kept_GCM, busy_GC = plan.kept_keys(), plan.sizes() > 0
    held_GC = (p_GCM * kept_GCM).sum(dim=-1)
    least_GC = p_GCM.masked_fill(~kept_GCM, 2.0).amin(dim=-1)
    assert (held_GC[busy_GC] >= 0.7 - 1e-5).all() and (held_GC - least_GC)[busy_GC].max() < 0.7 + 1e-5
    top = plan_clusters(q, k, KeepRule("top", 0.1), cluster_size=20)
    assert (top.lengths()[top.sizes() > 0] == 30).all()
    assert ((p_GCM * top.kept_keys()).sum(-1) - p_GCM.topk(30).values.sum(-1)).abs()[busy_GC].max() < 1e-5


def test_a_threshold_above_all_keeps_the_most_probable_key() -> None:
    q, k = draw(1, 1, 8, 4).abs() + 0.1, -draw(1, 1, 12, 4, seed=1).abs()
    k[0, 0, 5] = 3.0
    plan = plan_clusters(q, k, KeepRule("threshold", 1e9), cluster_size=2)
    assert set(plan.kv_index_Z.tolist()) == {5} and (plan.lengths()[plan.sizes() > 0] == 1).all()
    k[0, 0, 5] = torch.inf
    plan = plan_clusters(q, k, KeepRule("threshold", 1e9), cluster_size=2, metric="euclid")
    assert 5 in plan.kv_index_Z.tolist()  # its probability is not a number, nor is the output
    plan = plan_clusters(q, torch.ones(1, 1, 12, 4), KeepRule("threshold", 1.5), cluster_size=2)
    assert set(plan.kv_index_Z.tolist()) == {0}, "the first of equals"


def test_ranks_are_exact_with_ties_by_place() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0], [-torch.inf, 1.0, -torch.inf, 0.0, 0.5]])
    wanted = [[0, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert largest(x, torch.tensor([2, 4, 0])).int().tolist() == wanted
    values = draw(20_000)
    weights = (draw(20_000, seed=1).abs() * 10).long()
    for share in (0.01, 0.3, 0.9):
        cut = upper_quantile(values, weights, share)
        assert abs(float(weights[values >= cut].sum() / weights.sum()) - share) < 1e-3
    values[:4000] = torch.inf
    assert upper_quantile(values, weights, 0.1) == torch.inf


def test_rules_that_make_no_sense_are_refused() -> None:
    for wrong in (("threshold", -1.0), ("fraction", 0.0), ("mass", 1.1), ("top", float("nan")), ("best", 0.5)):
        with pytest.raises(ValueError, match="rule"):
            KeepRule(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at_least"):
        KeepRule("top", 0.5, at_least=0)


@pytest.mark.parametrize("grouping", ["clusters", "tiles"])
@pytest.mark.parametrize(("rule", "at_most"), [("threshold", 1.0), ("threshold", 0.5), ("top", 1.0), ("mass", 1.0)])
def test_a_key_that_is_not_a_number_is_not_hidden(rule: Rule, at_most: float, grouping: str) -> None:
    """Dense attention gives NaN for the whole head, and a run notices."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    k[0, 0, 3, 2] = torch.nan
    keep, context = KeepRule(rule, 0.3, at_most=at_most), PlannerContext(positions_NX=grid_positions((4, 4, 4)))
    plan = plan_clusters(q, k, keep, cluster_size=8) if grouping == "clusters" else None
    plan = plan or plan_tiles(q, k, keep, context, tile=(2, 2, 2))
    out = clustered_attention(q, k, v, plan).out_BAND
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert dense[0, 0].isnan().all() and dense[0, 1].isfinite().all()
    assert torch.equal(out.isnan(), dense.isnan())


def test_a_masked_key_that_is_not_a_number_is_not_shown() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    seen_BM = torch.ones(1, 64, dtype=torch.bool)
    seen_BM[0, 3] = False
    context = PlannerContext(seen_BM, positions_NX=grid_positions((4, 4, 4)))
    clean = plan_tiles(q, k, KeepRule("top", 0.3), context, tile=(2, 2, 2))
    k[:, :, 3] = torch.nan
    plan = plan_tiles(q, k, KeepRule("top", 0.3), context, tile=(2, 2, 2))
    assert torch.equal(plan.kv_index_Z, clean.kv_index_Z)
    assert clustered_attention(q, k, v, plan).out_BAND.isfinite().all()
