"""The oracle of sparse attention: all scores, and a mask. O(N M) in memory; gradients are autograd's.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan

from .kernel import SparseKernel, nobody


def _never(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    return ""


def tail_bias(plan: ClusterPlan, dtype: torch.dtype) -> Tensor:
    """Log of the number of keys that each mean stands for, for each query; -inf where it stands for none."""
    assert plan.tail is not None
    count_GNK = plan.tail.dropped_GCK.gather(1, plan.cluster_of_query()[..., None].expand(-1, -1, plan.tail.clusters))
    return count_GNK.to(dtype).log().view(plan.batch, plan.heads, plan.queries, plan.tail.clusters)


def weights(
    q_BAND: Tensor, k_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(weights_BANM, tail_weights_BANK, lse_BAN): the weight of each key, 0 at dropped ones, and that of each mean.

    In float32 at least. Results are padded with zeros to all keys and in the original order.
    """
    wide = torch.promote_types(q_BAND.dtype, torch.float32)
    keys = plan.keys
    score = ((q_BAND.to(wide) * scale) @ k_BAMD.to(wide).mT).masked_fill(~plan.kept_mask(), -torch.inf)
    if means is not None:
        coarse = (q_BAND.to(wide) * scale) @ means.k_BAKD.to(wide).mT + tail_bias(plan, wide)
        score = torch.cat((score, coarse), dim=-1)
    # a softmax over -inf alone has NaN gradients: rows that see no key run over zeros and are set to 0
    dead_BAN1 = (score == -torch.inf).all(dim=-1, keepdim=True)
    lse_BAN = score.logsumexp(dim=-1).masked_fill(dead_BAN1[..., 0], -torch.inf)
    p = score.masked_fill(dead_BAN1, 0.0).softmax(dim=-1).masked_fill(dead_BAN1, 0.0)
    return p[..., :keys], p[..., keys:] if means is not None else None, lse_BAN


def _attend(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans | None,
    scale: float,
    ran: Callable[[], object] = nobody,
) -> tuple[Tensor, Tensor]:
    ran()
    with torch.autocast(q_BAND.device.type, enabled=False):
        fine_BANM, coarse_BANK, lse_BAN = weights(q_BAND, k_BAMD, plan, means, scale)
        out_BAND = fine_BANM @ v_BAMD.to(fine_BANM.dtype)
        if means is not None and coarse_BANK is not None:
            out_BAND = out_BAND + coarse_BANK @ means.v_BAKD.to(fine_BANM.dtype)
    return out_BAND.to(q_BAND.dtype), lse_BAN.detach()


def _all_pairs(plan: ClusterPlan, tail: bool) -> Tensor:
    keys = plan.keys + (plan.tail.clusters if tail and plan.tail is not None else 0)
    return torch.tensor(plan.batch * plan.heads * plan.queries * keys)


MASKED = SparseKernel("masked", _never, _attend, _all_pairs)
