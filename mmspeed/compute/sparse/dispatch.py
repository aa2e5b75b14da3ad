"""The function of sparse attention, and the choice of a kernel for a call.

"auto" takes the first kernel that supports the call. It never takes `masked`, which computes all pairs, nor dense attention: a call that
no kernel supports raises ValueError.

Legend: B batch, A heads, N queries, M keys, D head width, K clusters of keys.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike
from mmspeed.errors import UserError, nearest

from .cluster_plan import ClusterMeans, ClusterPlan, fits, key_means
from .kernels.flex import FLEX
from .kernels.grouped import GROUPED
from .kernels.kernel import SparseKernel
from .kernels.masked import MASKED, weights
from .kernels.npu_kernels import NPU_BLOCK, NPU_TND
from .kernels.triton_gather import TRITON
from .kernels.varlen import VARLEN

TailKind = Literal["zero", "summary"]

KERNELS: dict[str, SparseKernel] = {
    kernel.name: kernel for kernel in (GROUPED, TRITON, FLEX, VARLEN, NPU_BLOCK, NPU_TND, MASKED)
}


@dataclass(frozen=True)
class Stats:
    """Statistics of a call. Tensors stay on the device."""

    backend: str
    kept_BA: Tensor  # share of all pairs of a query and a key that was kept
    pairs: Tensor  # pairs that were computed, including means and padding
    weights_BANM: Tensor | None = None  # if requested: the weight of each key, 0 at dropped ones
    tail_weights_BANK: Tensor | None = None  # and of each mean


class SparseOutput(NamedTuple):
    """The results of `clustered_attention`."""

    out_BAND: Tensor
    lse_BAN: Tensor  # natural log, float32 (float64 for float64), without a gradient; -inf where a query sees no key
    stats: Stats


def clustered_attention(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    plan: ClusterPlan,
    *,
    tail: TailKind = "zero",
    means: ClusterMeans | None = None,
    scale: float | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
    return_weights: bool = False,
) -> SparseOutput:
    """Attention of every query to the keys that its cluster keeps; differentiable in queries, keys and values.

    Args:
        plan: made of (detached) queries and keys by a planner.
        tail: the treatment of dropped keys. "zero": they do not count. "summary": the means of their clusters, each with the log of the
            number of keys that it stands for, are in the same softmax.
        means: with "summary", of the plan's clusters of keys; computed from keys and values when None.
        scale: of the scores; D ** -0.5 when None.
        backend: "auto", or a kernel's name: see KERNELS.
        counter: counts runs by kernel, under "sparse_<name>"; a recomputation that holds the results runs none.
        return_weights: also the whole matrix of weights, O(N M): for small inputs.

    A query that sees no key gives 0 and no gradient. Under autocast, computes in its dtype.
    Raises ValueError for a plan that does not fit, "summary" with a plan without a tail, and a kernel that does not support the call.
    """
    q_BAND, k_BAMD, v_BAMD = autocast_alike(q_BAND, k_BAMD, v_BAMD)
    problem = fits(plan, q_BAND, k_BAMD, v_BAMD)
    if problem:
        raise ValueError(problem)
    if tail not in ("zero", "summary"):
        raise ValueError(f"tail {tail!r} is not one of zero, summary")
    if tail == "summary":
        if plan.tail is None:
            raise ValueError(
                "tail='summary' needs a plan with clusters of keys: give the planner tail_clusters (of tiles and windows: tail=True)"
            )
        means = key_means(k_BAMD, v_BAMD, plan.tail) if means is None else means
    else:
        means = None
    scale = q_BAND.shape[-1] ** -0.5 if scale is None else scale
    kernel = choose_kernel(q_BAND, k_BAMD, v_BAMD, plan, means, backend)

    def ran() -> None:
        if counter is not None:
            counter[f"sparse_{kernel.name}"] += 1

    out_BAND, lse_BAN = kernel.attend(q_BAND, k_BAMD, v_BAMD, plan, means, scale, ran)
    full, full_tail = None, None
    if return_weights:
        with torch.no_grad():
            full, full_tail, _ = weights(q_BAND, k_BAMD, plan, means, scale)
    stats = Stats(kernel.name, plan.kept_share(), kernel.pairs(plan, means is not None), full, full_tail)
    return SparseOutput(out_BAND, lse_BAN, stats)


def check_backend(name: str, knob: str) -> None:
    """Raises UserError for an unknown kernel name."""
    if name not in ("auto", *KERNELS):
        raise UserError(f"{knob} {name} is not one of auto, {', '.join(KERNELS)}{nearest(name, list(KERNELS))}")


def choose_kernel(
    q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, backend: str = "auto"
) -> SparseKernel:
    """The kernel for a call. Raises ValueError when the named one, or every one, does not support it."""
    if backend != "auto":
        if backend not in KERNELS:
            raise ValueError(f"sparse attention backend {backend!r} is not one of auto, {', '.join(KERNELS)}")
        reason = KERNELS[backend].refuses(q_BAND, k_BAMD, v_BAMD, plan, means)
        if reason:
            raise ValueError(f"sparse attention backend {backend!r} does not serve {reason}")
        return KERNELS[backend]
    reasons = []
    for name, kernel in KERNELS.items():
        if kernel is MASKED:
            continue
        reason = kernel.refuses(q_BAND, k_BAMD, v_BAMD, plan, means)
        if not reason:
            return kernel
        reasons.append(f"{name}: {reason}")
    raise ValueError(
        "no kernel of sparse attention serves this call"
        + (f" ({'; '.join(reasons)})" if reasons else "")
        + "; backend='masked' does, in O(N^2) memory"
    )
