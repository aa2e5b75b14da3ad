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
from mmspeed.parallel.experts import SpreadExperts
from mmspeed.plan.traffic import EvenRouting
from mmspeed.protocols.plan import modules_like, plan_of


class _LoneAxis(Axis):
    """An axis of several processes of which this one alone is there: it sends to none, and what comes has no values."""

    def others(self) -> list[int]:
        return []


def _axis(name: str, size: int) -> Axis:
    return _LoneAxis(name, None, size, 0, exchange="point_to_point")


def _even(rows: int, axis: Axis) -> RowCounts:
    sizes = even_sizes(rows, axis.size)
    return RowCounts(sizes, sizes)


class EvenDispatcher(FlatDispatcher):
    """A dispatcher to processes that are not there."""

    def _counts(self, order: ExpertOrder) -> tuple[RowCounts, Tensor]:
        counts = _even(len(order.order_R), self.axis)
        return counts, torch.empty(self.axis.size, self.experts // self.axis.size, dtype=torch.int64)


class EvenNodeDispatcher(HierarchicalDispatcher):
    """A dispatcher by way of nodes that are not there."""

    def _counts(self, goes_TO: Tensor, expert_TK: Tensor) -> tuple[RowCounts, RowCounts, Tensor]:
        (tokens, choices), nodes, inner = expert_TK.shape, self.outer.size, self.inner.size
        each = math.ceil(tokens * EvenRouting(self.experts, choices).reaches(nodes))
        of_node = torch.empty(inner, self.experts // nodes // inner, dtype=torch.int64)
        return RowCounts((each,) * nodes, (each,) * nodes), _even(tokens * choices, self.inner), of_node


def outline_experts(model: nn.Module, parallel: ParallelConfig) -> None:
    """Leave a model on the meta device the experts of one process, in place; as `spread_experts`, for fake tensors."""
    plan, ep, inner = plan_of(model), parallel.ep, parallel.ep_inner
    if ep == 1 or plan is None:
        return
    for pattern in plan.experts:
        for _, module in modules_like(model, pattern, "plan, experts"):
            own = dict(module.named_parameters(recurse=False))
            experts = len(next(iter(own.values())))
            for name, whole in own.items():
                part = whole.detach().chunk(ep)[0]
                module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
            nodes = None if inner is None else (_axis("ep_outer", ep // inner), _axis("ep_inner", inner))
            dispatcher = (
                EvenDispatcher(_axis("ep", ep), experts) if nodes is None else EvenNodeDispatcher(*nodes, experts)
            )
            mix_in(module, SpreadExperts, rename=False)._dispatcher = dispatcher
