"""Lend experts: copies of an expert's weights go to the processes that take a share of its rows, and their gradients come back.

Which copies there are is decided between steps (`mmspeed.moe.balance.plan_shares`), alike on all processes. A process has room for one in
a layer.

Legend: L experts of a process, C copies that come (0 or 1), Z rows that come, E width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.comm import Axis, PendingExchange, RowCounts, finish, start_rows
from mmspeed.compute.autocast import autocast_alike
from mmspeed.moe.balance import Share, Whole


@dataclass(frozen=True)
class Lending:
    """The copies of a layer as one process sees them.

    experts: those that it lends, numbered on it, by the process that they go to. counts: copies by process.
    """

    experts: tuple[int, ...]
    counts: RowCounts

    @property
    def borrows(self) -> bool:
        """True where a copy comes to this process."""
        return sum(self.counts.comes) > 0

    @classmethod
    def of(cls, plan: Sequence[Share], place_G: Whole, axis: Axis) -> Lending | None:
        """The copies of a plan; None where it has none. place_G: the place of each expert."""
        if not plan:
            return None
        each = len(place_G) // axis.size
        mine = sorted((share.target, int(place_G[share.expert]) % each) for share in plan if share.source == axis.rank)
        comes = [share.source for share in plan if share.target == axis.rank]
        places = range(axis.size)
        sends = tuple(sum(target == place for target, _ in mine) for place in places)
        return cls(tuple(expert for _, expert in mine), RowCounts(sends, tuple(comes.count(place) for place in places)))


def start_lending(weights: Mapping[str, Tensor], lending: Lending, axis: Axis) -> dict[str, PendingExchange]:
    """Start sending copies of weights that are stacked by expert, in the dtype of products; their gradients come back the same way."""

    def sent(weight: Tensor) -> Tensor:
        if lending.experts:
            index = torch.tensor(lending.experts, device=weight.device)
            return autocast_alike(weight.index_select(0, index))[0]
        empty = weight.new_empty((0, *weight.shape[1:]), requires_grad=weight.requires_grad)
        return autocast_alike(empty)[0]  # every process takes part in the exchange of gradients

    return {name: start_rows(sent(weight), axis, lending.counts, "experts") for name, weight in weights.items()}


def finish_lending(pending: Mapping[str, PendingExchange]) -> dict[str, Tensor]:
    """The weights that came, (C, ...) each."""
    return {name: finish(each) for name, each in pending.items()}


class _Tied(torch.autograd.Function):
    """A tensor as it is; others, which nothing may use, get gradients of zeros, so that their exchange has its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


def tied(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """`x`, whose gradient brings the backward pass of `others` with it."""
    out: Tensor = _Tied.apply(x, *others)
    return out
