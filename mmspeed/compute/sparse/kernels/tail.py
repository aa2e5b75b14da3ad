"""Attention to the means of dropped keys, for kernels that compute kept keys alone: two parts of one softmax, merged.

Eager, with queries in parts, so that its scores never fill the memory. With N / 128 means it is a small part of a call's pairs.

Legend: B batch, A heads, G = B x A, N queries, n a part of them, D head width, C clusters of queries, K clusters of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan

SCORES = 1 << 25  # scores held at a time: 128 MiB in float32


def _parts(plan: ClusterPlan) -> Iterator[tuple[slice, slice]]:
    """Heads and queries whose scores are computed together."""
    assert plan.tail is not None
    groups, each = plan.batch * plan.heads, max(1, plan.queries * plan.tail.clusters)
    heads = max(1, SCORES // each)
    queries = plan.queries if heads > 1 else max(1, SCORES // plan.tail.clusters)
    for g in range(0, groups, heads):
        for n in range(0, plan.queries, max(1, queries)):
            yield slice(g, min(g + heads, groups)), slice(n, min(n + queries, plan.queries))


def _scores(q_GnD: Tensor, k_GKD: Tensor, plan: ClusterPlan, cluster_Gn: Tensor, part: slice, scale: float) -> Tensor:
    """Scores with the log of the number of keys that each mean stands for; -inf where it stands for none."""
    assert plan.tail is not None
    count_GnK = plan.tail.dropped_GCK[part].gather(1, cluster_Gn[..., None].expand(-1, -1, plan.tail.clusters))
    return torch.baddbmm(count_GnK.to(q_GnD.dtype).log_(), q_GnD, k_GKD.mT, alpha=scale)


def coarse_forward(q_BAND: Tensor, plan: ClusterPlan, means: ClusterMeans, scale: float) -> tuple[Tensor, Tensor]:
    """(out_BAND, lse_BAN) over the means alone, in float32 at least; 0 and -inf where a query's means stand for no keys."""
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    q_GND, k_GKD, v_GKD = (x.flatten(0, 1) for x in (q_BAND, means.k_BAKD.to(wide), means.v_BAKD.to(wide)))
    out_GND = torch.empty(*q_GND.shape[:2], v_GKD.shape[-1], dtype=wide, device=q_BAND.device)
    lse_GN = torch.empty(q_GND.shape[:2], dtype=wide, device=q_BAND.device)
    cluster_GN = plan.cluster_of_query()
    for g, n in _parts(plan):
        score = _scores(q_GND[g, n].to(wide), k_GKD[g], plan, cluster_GN[g, n], g, scale)
        lse_Gn = score.logsumexp(dim=-1)
        level = lse_Gn.masked_fill(lse_Gn == -torch.inf, 0.0)[..., None]
        out_GND[g, n] = (score - level).exp_() @ v_GKD[g]
        lse_GN[g, n] = lse_Gn
    return out_GND.unflatten(0, q_BAND.shape[:2]), lse_GN.unflatten(0, q_BAND.shape[:2])


def coarse_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    lse_BAN: Tensor,
    delta_BAN: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans,
    scale: float,
) -> tuple[Tensor, ClusterMeans]:
    """(dq_BAND, dmeans) in float32 at least: the means' share in the gradients of a softmax whose log-sum-exp over all parts is `lse`.

    delta_BAN: sum(dout x out) of that softmax, minus the gradient of its log-sum-exp, if it has one.
    """
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    q_GND, dout_GND, lse_GN, delta_GN = (x.flatten(0, 1) for x in (q_BAND, dout_BAND, lse_BAN, delta_BAN))
    k_GKD, v_GKD = means.k_BAKD.flatten(0, 1).to(wide), means.v_BAKD.flatten(0, 1).to(wide)
    dq_GND = torch.empty(q_GND.shape, dtype=wide, device=q_BAND.device)
    dk_GKD, dv_GKD = torch.zeros_like(k_GKD), torch.zeros_like(v_GKD)
    cluster_GN = plan.cluster_of_query()
    for g, n in _parts(plan):
        q_GnD, dout_GnD = q_GND[g, n].to(wide), dout_GND[g, n].to(wide)
        score = _scores(q_GnD, k_GKD[g], plan, cluster_GN[g, n], g, scale)
        level = lse_GN[g, n].masked_fill(lse_GN[g, n] == -torch.inf, torch.inf)[..., None]
        p_GnK = (score - level).exp_()
        ds_GnK = p_GnK * (dout_GnD @ v_GKD[g].mT - delta_GN[g, n][..., None]) * scale
        dq_GND[g, n] = ds_GnK @ k_GKD[g]
        dk_GKD[g] += ds_GnK.mT @ q_GnD
        dv_GKD[g] += p_GnK.mT @ dout_GnD
    shape = q_BAND.shape[:2]
    return dq_GND.unflatten(0, shape), ClusterMeans(dk_GKD.unflatten(0, shape), dv_GKD.unflatten(0, shape))


class _Coarse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BAND: Tensor, k_BAKD: Tensor, v_BAKD: Tensor, plan: ClusterPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        out_BAND, lse_BAN = coarse_forward(q_BAND, plan, ClusterMeans(k_BAKD, v_BAKD), scale)
        ctx.save_for_backward(q_BAND, k_BAKD, v_BAKD, out_BAND, lse_BAN)
        ctx.plan, ctx.scale = plan, scale
        return out_BAND, lse_BAN

    @staticmethod
    def backward(ctx: Any, dout_BAND: Tensor, dlse_BAN: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        delta = (dout_BAND * out).sum(dim=-1) - dlse_BAN
        dq, dmeans = coarse_backward(dout_BAND, q, lse, delta, ctx.plan, ClusterMeans(k, v), ctx.scale)
        return dq.to(q.dtype), dmeans.k_BAKD.to(k.dtype), dmeans.v_BAKD.to(v.dtype), None, None


def coarse(q_BAND: Tensor, plan: ClusterPlan, means: ClusterMeans, scale: float) -> tuple[Tensor, Tensor]:
    """The results of `coarse_forward`, differentiable in queries and means through output and log-sum-exp."""
    out_BAND, lse_BAN = _Coarse.apply(q_BAND, means.k_BAKD, means.v_BAKD, plan, scale)
    return out_BAND, lse_BAN


def merge_parts(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of two parts of one softmax, merged, in float32 at least; differentiable in all four, also for empty parts."""
    dead = (lse == -torch.inf) & (other_lse == -torch.inf)  # -inf minus -inf would be a gradient
    level = torch.logaddexp(lse.masked_fill(dead, 0.0), other_lse.masked_fill(dead, 0.0))
    merged = out * (lse - level).exp()[..., None] + other_out * (other_lse - level).exp()[..., None]
    return merged, level.masked_fill(dead, -torch.inf)


def with_means(
    q_BAND: Tensor, out_BAND: Tensor, lse_BAN: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over kept keys and means, from those over kept keys; unchanged without means."""
    if means is None:
        return out_BAND, lse_BAN
    merged, lse_BAN = merge_parts(out_BAND, lse_BAN, *coarse_forward(q_BAND, plan, means, scale))
    return merged.to(q_BAND.dtype), lse_BAN


def with_means_backward(
    dq_BAND: Tensor,
    dout_BAND: Tensor,
    q_BAND: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans | None,
    scale: float,
) -> tuple[Tensor, ClusterMeans | None]:
    """The queries' gradient over kept keys and means, from that over kept keys, and the gradients of the means; out and lse are of both."""
    if means is None:
        return dq_BAND, None
    delta_BAN = (dout_BAND.to(lse_BAN.dtype) * out_BAND).sum(dim=-1)
    more, wide = coarse_backward(dout_BAND, q_BAND, lse_BAN, delta_BAN, plan, means, scale)
    dmeans = ClusterMeans(wide.k_BAKD.to(means.k_BAKD.dtype), wide.v_BAKD.to(means.v_BAKD.dtype))
    return (more + dq_BAND).to(q_BAND.dtype), dmeans
