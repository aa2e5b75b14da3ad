"""Check the kernels of sparse attention of a device against the masked one in float64 on the CPU, by the same plan, with gradients.

Legend: B batch, A heads, N tokens, D head width, X position axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.bench.attention_data import Grid, make_qkv
from mmspeed.compute.sparse import ClusterPlan, clustered_attention, key_means
from mmspeed.compute.sparse.dispatch import KERNELS, TailKind
from mmspeed.compute.sparse.kernels.masked import MASKED
from mmspeed.compute.sparse.planners.clusters import plan_clusters
from mmspeed.compute.sparse.planners.patterns import plan_skip, plan_window
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.compute.sparse.planners.tiles import plan_tiles
from mmspeed.device import Device

from .oracle import NAMES, Errors, number_types, short_name
from .rows import Check, Outcome

PART = "kernels"
SMALL_GRID: Grid = (2, 8, 8)
GRID: Grid = (4, 16, 16)
TILES: dict[Grid, Grid] = {SMALL_GRID: (1, 4, 4), GRID: (2, 8, 8)}  # 128 tokens, as the operators for blocks want
WIDTHS = (64, 72, 128)
COMPILED = {
    "triton": 100.0,
    "flex": 60.0,
}  # seconds, the slowest number type on an H200: these are compiled for each shape


@dataclass(frozen=True)
class SparseCase:
    """A plan to compute: the planner, its tail, masked keys, and the width of a head."""

    planner: str
    tail: TailKind
    masked: bool = False
    width: int = 64

    @property
    def name(self) -> str:
        return f"{self.planner}, {self.tail} tail" + (", masked" if self.masked else "") + f", {self.width}"


CASES = (
    *(SparseCase(planner, tail) for planner in ("clusters", "tiles") for tail in ("zero", "summary")),
    SparseCase("clusters", "summary", masked=True),
    SparseCase("tiles", "zero", masked=True),
    SparseCase("window", "zero"),
    SparseCase("skip", "summary"),
    *(SparseCase(planner, "zero", width=width) for planner in ("clusters", "tiles") for width in WIDTHS[1:]),
)


# those that a CPU runs in small
SMALL_CASES = tuple(case for case in CASES if case.width != 72 and not (case.masked and case.planner == "tiles"))


@dataclass(frozen=True)
class PlannedCase:
    """A case on a device: its inputs, its plan, and the true results."""

    inputs: list[Tensor]  # q, k, v, dout, BAND
    plan: ClusterPlan
    right: dict[str, Tensor]


class SparseCases:
    """The cases of a device, each planned once for each number type."""

    def __init__(self, device: Device, small: bool) -> None:
        self.device, self.grid = device, SMALL_GRID if small else GRID
        self.cases = SMALL_CASES if small else CASES
        self._planned: dict[tuple[SparseCase, torch.dtype], PlannedCase] = {}

    def planned(self, case: SparseCase, dtype: torch.dtype) -> PlannedCase:
        """The case with its plan and truth. Raises ValueError for a plan that is not consistent."""
        if (case, dtype) not in self._planned:
            *inputs, positions_NX = self.inputs(case, dtype)
            plan = self.plan(case, inputs[0], inputs[1], positions_NX)
            plan.check()
            self._planned[case, dtype] = PlannedCase(inputs, plan, true_results(case, inputs, plan))
        return self._planned[case, dtype]

    def inputs(self, case: SparseCase, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v, dout of two videos, and the positions of their tokens."""
        looks = [make_qkv(self.grid, 2, case.width, seed=seed) for seed in range(2)]
        q, k, v = (torch.cat([look[place] for look in looks]) for place in range(3))
        dout = rng.normal(v.shape, 0, "qualify", "sparse gradient", case.width)
        where = self.device.torch_device
        return [*(x.to(where, dtype) for x in (q, k, v, dout)), looks[0][3].to(where)]

    def plan(self, case: SparseCase, q: Tensor, k: Tensor, positions_NX: Tensor) -> ClusterPlan:
        """The plan of a case, made on the device."""
        mask = None
        if case.masked:
            mask = (rng.normal((q.shape[0], q.shape[2]), 0, "qualify", "sparse mask") > -1.0).to(q.device)
        context, tail, tile = (
            PlannerContext(mask, positions_NX=positions_NX),
            case.tail == "summary",
            TILES[self.grid],
        )
        if case.planner == "tiles":
            return plan_tiles(q, k, KeepRule("top", 0.4), context, tile=tile, tail=tail)
        if case.planner == "window":
            return plan_window(q, k, context, tile=tile, window=(1, 3, 3), tail=tail)
        clusters = 8 if tail else 0
        if case.planner == "skip":
            return plan_skip(q, k, context, stride=4, way=0, tail_clusters=clusters)
        return plan_clusters(q, k, KeepRule("fraction", 0.3), context, cluster_size=32, tail_clusters=clusters)


def sparse_checks(device: Device, small: bool) -> Iterator[Check]:
    """A check of each kernel in each number type."""
    cases = SparseCases(device, small)
    for dtype in number_types(device):
        for kernel in KERNELS:
            name = f"sparse {kernel} {short_name(dtype)}"
            seconds = 2.0 if small else COMPILED.get(kernel, 5.0)
            yield Check(PART, name, partial(check_sparse, cases, dtype, kernel), seconds)


def check_sparse(cases: SparseCases, dtype: torch.dtype, kernel: str) -> Outcome:
    """A kernel on the plans that it serves; without gradients where it has none on this device."""
    errors, refusals, forward_only = Errors(dtype), list[str](), 0
    for case in cases.cases:
        one = cases.planned(case, dtype)
        q, k, v, dout = one.inputs
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        means = None if case.tail == "zero" or one.plan.tail is None else key_means(k, v, one.plan.tail)
        reason = KERNELS[kernel].refuses(*leaves, one.plan, means)
        if not reason:
            out, lse, _ = clustered_attention(*leaves, one.plan, tail=case.tail, backend=kernel)
            results = (out, lse, *torch.autograd.grad(out, leaves, dout))
            errors.add(case.name, dict(zip(NAMES, results, strict=True)), one.right)
            continue
        with torch.no_grad():
            if KERNELS[kernel].refuses(q, k, v, one.plan, means):
                refusals.append(reason)
                continue
            out, lse, _ = clustered_attention(q, k, v, one.plan, tail=case.tail, backend=kernel)
        forward_only += 1
        errors.add(case.name, {"out": out, "lse": lse}, one.right)
    return errors.outcome(refusals, f"; {forward_only} forward only" if forward_only else "")


def true_results(case: SparseCase, inputs: list[Tensor], plan: ClusterPlan) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of a plan in float64 on the CPU, by the masked kernel, which computes all pairs."""
    *leaves, dout = (x.detach().cpu().double() for x in inputs)
    q, k, v = (x.requires_grad_() for x in leaves)
    plan = on_host(plan)
    means = key_means(k, v, plan.tail) if case.tail == "summary" and plan.tail is not None else None
    out, lse = MASKED.attend(q, k, v, plan, means, q.shape[-1] ** -0.5)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    results = (out.detach(), lse, *grads)
    return dict(zip(NAMES, results, strict=True))


def on_host(value: Any) -> Any:
    """A dataclass of tensors, or a tensor, on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: on_host(getattr(value, each.name)) for each in fields(value)})
    return value
