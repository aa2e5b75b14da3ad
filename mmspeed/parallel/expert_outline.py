"""Experts over devices, from shapes: one process of a layout, without the others.

Loads are taken to be even: as many rows come to a process as it sends, and each token draws its experts from all alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.axes import AxisName
from mmspeed.comm import Axis, Ledger, RowCounts, even_sizes
from mmspeed.compute.operators.permutation import ExpertOrder
from mmspeed.config.parallel import ParallelConfig
from mmspeed.moe.dispatch import FlatDispatcher, HierarchicalDispatcher
from mmspeed.plan.traffic import EvenRouting

from .boundaries.layout import TokenLayout
from .experts import spread_experts, spread_modules


class _LoneAxis(Axis):
    """An axis of several processes of which this one alone is there: it sends to none, and what comes has no values."""

    def others(self) -> list[int]:
        return []

    def count(self, kind: str, sent: int | Sequence[int], *args: Any, **kwargs: Any) -> None:
        assert not isinstance(sent, int)
        self.ledger.add(kind, self.name, sum(sent) - sent[self.rank])


def _axis(name: AxisName, size: int, sent: Ledger) -> Axis:
    return _LoneAxis(name.value, None, size, 0, sent, exchange="point_to_point")


def _even(rows: int, axis: Axis, etp: Axis, experts: int) -> tuple[RowCounts, Tensor]:
    """Rows by process, and room for those that come to each of `etp` by process and expert."""
    sizes, come_SPL = even_sizes(rows, axis.size), torch.empty(etp.size, axis.size, experts, dtype=torch.int64)
    return RowCounts(sizes, sizes, (rows,) * etp.size, even_sizes(rows * etp.size, experts)), come_SPL


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


def outline_experts(model: nn.Module, parallel: ParallelConfig) -> Ledger:
    """Leave a model the experts of one process, in place; returns the ledger of what it will send. Raises UserError as `spread_experts`."""
    sent = Ledger()
    if parallel.expert_devices == 1:
        return sent
    ep, etp, inner = parallel.ep, _axis(AxisName.ETP, parallel.etp, sent), parallel.ep_inner
    nodes = None
    if inner is not None:
        nodes = _axis(AxisName.EP_OUTER, ep // inner, sent), _axis(AxisName.EP_INNER, inner, sent)
    spread_experts(model, None, TokenLayout(experts=_axis(AxisName.EP, ep, sent), etp=etp, nodes=nodes))
    for module in spread_modules(model):
        known = module._dispatcher
        if nodes is None:
            module._dispatcher = EvenDispatcher(module._axis, known.experts, etp)
        else:
            module._dispatcher = EvenNodeDispatcher(*nodes, known.experts, etp)
    return sent
