"""The interface of kernels of sparse attention, and the autograd function for those that compute their own gradients.

Legend: B batch, A heads, N queries, M keys, D head width, K clusters of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan
from mmspeed.replay import checkpointed_if

# the reason why a kernel does not support a call, or an empty string
Refuses = Callable[[Tensor, Tensor, Tensor, ClusterPlan, "ClusterMeans | None"], str]
# (q, k, v, plan, means, scale) -> out_BAND in the dtype of the queries, lse_BAN in float32 (float64 for float64)
Forward = Callable[[Tensor, Tensor, Tensor, ClusterPlan, "ClusterMeans | None", float], tuple[Tensor, Tensor]]
# (dout, q, k, v, out, lse, plan, means, scale) -> dq, dk, dv, and dmeans where there are means
Gradients = tuple[Tensor, Tensor, Tensor, "ClusterMeans | None"]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, ClusterPlan, "ClusterMeans | None", float], Gradients
]
# pairs of a query and a key (or a mean) that the kernel computes for a plan, including padding: an int64 scalar
Pairs = Callable[[ClusterPlan, bool], Tensor]


def kept_and_means(plan: ClusterPlan, tail: bool) -> Tensor:
    """Pairs of a kernel without padding: the kept ones, and every query with every cluster of keys."""
    pairs = plan.kept_pairs().sum()
    if tail and plan.tail is not None:
        pairs = pairs + plan.batch * plan.heads * plan.queries * plan.tail.clusters
    return pairs


def nobody() -> None:
    """Do nothing: the `ran` of a caller that does not count."""


class KernelFunction(Protocol):
    """A kernel with its gradients. `ran` is called when it computes; a recomputation that holds the results does not."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: ClusterPlan,
        means: ClusterMeans | None,
        scale: float,
        ran: Callable[[], object] = nobody,
        /,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class SparseKernel:
    """A way to compute a plan. `attend` has gradients in queries, keys, values and means; its log-sum-exp need not.

    A kernel that computes its own gradients (`explicit`) offers its results for recomputation. For the others, whose gradients are
    autograd's, a second pass computes the attention again: for `masked`, all but the matrix products that it kept.
    """

    name: str
    refuses: Refuses
    attend: KernelFunction
    pairs: Pairs = kept_and_means


def explicit(forward: Forward, backward: Backward) -> KernelFunction:
    """The `attend` of a kernel that computes its own gradients."""

    def attend(
        q_BAND: Tensor,
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        plan: ClusterPlan,
        means: ClusterMeans | None,
        scale: float,
        ran: Callable[[], object] = nobody,
    ) -> tuple[Tensor, Tensor]:
        both = (None, None) if means is None else (means.k_BAKD, means.v_BAKD)

        def compute(*arguments: Any) -> tuple[Tensor, Tensor]:
            ran()
            return forward(*arguments)

        offers = torch.is_grad_enabled()
        out_BAND, lse_BAN = _Explicit.apply(q_BAND, k_BAMD, v_BAMD, *both, plan, scale, compute, backward, offers)
        return out_BAND, lse_BAN

    return attend


class _Explicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BAND: Tensor,
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        mean_k: Tensor | None,
        mean_v: Tensor | None,
        plan: ClusterPlan,
        scale: float,
        forward: Forward,
        backward: Backward,
        offers: bool,
    ) -> tuple[Tensor, Tensor]:
        means = None if mean_k is None or mean_v is None else ClusterMeans(mean_k, mean_v)
        arguments = q_BAND, k_BAMD, v_BAMD, plan, means, scale
        out_BAND, lse_BAN = checkpointed_if(offers, "attention", lambda: forward(*arguments))
        ctx.save_for_backward(q_BAND, k_BAMD, v_BAMD, mean_k, mean_v, out_BAND, lse_BAN)
        ctx.plan, ctx.scale, ctx.gradients = plan, scale, backward
        ctx.mark_non_differentiable(lse_BAN)
        return out_BAND, lse_BAN

    @staticmethod
    def backward(ctx: Any, dout_BAND: Tensor, _: Any) -> Any:
        q, k, v, mean_k, mean_v, out, lse = ctx.saved_tensors
        means = None if mean_k is None else ClusterMeans(mean_k, mean_v)
        dq, dk, dv, dmeans = ctx.gradients(dout_BAND, q, k, v, out, lse, ctx.plan, means, ctx.scale)
        both = (None, None) if dmeans is None else (dmeans.k_BAKD, dmeans.v_BAKD)
        return dq, dk, dv, *both, None, None, None, None, None
