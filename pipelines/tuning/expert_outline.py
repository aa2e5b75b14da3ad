"""Experts over devices, from shapes: one process of a layout, without the others.

Loads are taken to be even: as many rows come to a process as it sends, and each token draws its experts from all alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmspeed.comm import Axis, RowCounts, even_sizes
from mmspeed.compute.operators.permutation import ExpertOrder
from mmspeed.config.parallel import ParallelConfig
from mmspeed.mixin import mix_in
from mmspeed.moe.dispatch import FlatDispatcher, HierarchicalDispatcher
from mmspeed.parallel.boundaries.linears import JoinedColumns
from mmspeed.parallel.experts import SpreadExperts
from mmspeed.plan.traffic import EvenRouting
from mmspeed.protocols.plan import modules_like, plan_of


class _LoneAxis(Axis):
    """An axis of several processes of which this one alone is there: it sends to none, and what comes has no values."""

    def others(self) -> list[int]:
        return []


def _axis(name: str, size: int) -> Axis:
    return _LoneAxis(name, None, size, 0, exchange="point_to_point")


def _even(rows: int, axis: Axis, etp: Axis, experts: int) -> tuple[RowCounts, Tensor]:
    """Rows by process, and room for those that come to each of `etp` by process and expert."""
    sizes = even_sizes(rows, axis.size)
    kinds = even_sizes(rows * etp.size, experts)
    return RowCounts(sizes, sizes, (rows,) * etp.size, kinds), torch.empty(
        etp.size, axis.size, experts, dtype=torch.int64
    )


class EvenDispatcher(FlatDispatcher):
    """A dispatcher to processes that are not there."""

    def _counts(self, order: ExpertOrder) -> tuple[RowCounts, Tensor]:
        return _even(len(order.order_R), self.axis, self.etp, self.experts // self.axis.size)


class EvenNodeDispatcher(HierarchicalDispatcher):
    """A dispatcher by way of nodes that are not there."""

    def _counts(self, goes_TO: Tensor, expert_TK: Tensor, slots: int) -> tuple[RowCounts, RowCounts, Tensor]:
        (tokens, choices), nodes, inner = expert_TK.shape, self.outer.size, self.inner.size
        each = math.ceil(tokens * EvenRouting(self.experts, choices).reaches(nodes))
        by_inner = _even(tokens * choices, self.inner, self.etp, slots // nodes // inner)
        return RowCounts((each,) * nodes, (each,) * nodes), *by_inner


def outline_experts(model: nn.Module, parallel: ParallelConfig) -> None:
    """Leave a model on the meta device the experts of one process, in place; as `spread_experts`, for fake tensors."""
    plan, ep, inner, etp = plan_of(model), parallel.ep, parallel.ep_inner, _axis("etp", parallel.etp)
    if ep * etp.size == 1 or plan is None:
        return
    for pattern, hidden in plan.experts.items():
        for _, module in modules_like(model, pattern, "plan, experts"):
            own = dict(module.named_parameters(recurse=False))
            experts, joined = len(next(iter(own.values()))), {}
            for name, whole in own.items():
                part = whole.detach().chunk(ep)[0]
                if etp.size > 1:
                    at = hidden[name]
                    part = part.chunk(etp.size, at.dim)[0]
                    if at.joined > 1:
                        joined[name] = JoinedColumns(etp, (whole.shape[at.dim] // at.joined,) * at.joined), at.dim
                module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
            nodes = None if inner is None else (_axis("ep_outer", ep // inner), _axis("ep_inner", inner))
            spread = mix_in(module, SpreadExperts, rename=False)
            spread._joined, spread._axis = joined, _axis("ep", ep)
            if nodes is None:
                spread._dispatcher = EvenDispatcher(spread._axis, experts, etp)
            else:
                spread._dispatcher = EvenNodeDispatcher(*nodes, experts, etp)
