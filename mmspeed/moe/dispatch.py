"""Send tokens to the processes that hold their experts, and the experts' outputs back (expert parallelism; GShard, Lepikhin et al. 2020).

Dropless: every choice of a token becomes a row, and every row is computed. A process sends its rows sorted by expert, hence by process;
before them go the counts by process and expert, which the host reads once. A row carries its gate, so that experts weigh their hidden units
before the second product, as on one process.

Legend: T tokens, K experts of a token, R = T x K rows, E width, G experts, P processes, L = G / P experts of a process, Z rows that come,
M width of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.comm import Axis, PendingExchange, RowCounts, finish, row_counts, start_rows
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.operators.permutation import ExpertOrder, combine, order_by_expert, permute


@dataclass(frozen=True)
class Dispatched:
    """Rows on their way to experts.

    order: that of the rows sent. counts: rows by process. expert_Z: the expert of each row that comes, numbered on this process.
    """

    order: ExpertOrder
    counts: RowCounts
    expert_Z: Tensor
    width: int
    gates: torch.dtype
    pending: PendingExchange


class FlatDispatcher:
    """One exchange there and one back between all processes of an axis, of which each holds G / P experts in order."""

    def __init__(self, axis: Axis, experts: int) -> None:
        self.axis, self.experts = axis, experts

    def __deepcopy__(self, memo: Any) -> FlatDispatcher:
        return self  # process groups cannot be copied, and nothing in it belongs to one copy

    def start(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> Dispatched:
        """Start sending each token to its experts; rows travel in the dtype of products."""
        (x_TE,) = autocast_alike(x_TE)
        order = order_by_expert(expert_TK, self.experts)
        ends_G = order.ends_G.long()
        counts_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
        counts, come_PL = row_counts(counts_G.view(self.axis.size, -1), self.axis)
        here_L = torch.arange(come_PL.shape[1], device=come_PL.device)
        expert_Z = here_L.repeat(self.axis.size).repeat_interleave(come_PL.flatten(), output_size=sum(counts.comes))
        message_RM: Tensor = _Joined.apply(permute(x_TE, order), weights_TK.flatten()[order.order_R])
        pending = start_rows(message_RM, self.axis, counts, "dispatch")
        return Dispatched(order, counts, expert_Z, x_TE.shape[1], weights_TK.dtype, pending)

    def finish(self, sent: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
        """(rows_ZE, gates_Z1, expert_Z1): the rows that came, by process and then by expert, each as a token of one choice."""
        rows_ZE, gates_Z = _Parted.apply(finish(sent.pending), sent.width, sent.gates)
        return rows_ZE, gates_Z[:, None], sent.expert_Z[:, None]

    def start_back(self, sent: Dispatched, out_ZE: Tensor) -> PendingExchange:
        """Start sending the experts' outputs back."""
        return start_rows(out_ZE, self.axis, sent.counts.back(), "combine")

    def finish_back(self, sent: Dispatched, pending: PendingExchange) -> Tensor:
        """The sum of each token's outputs, (T, E)."""
        out_TE: Tensor = combine(finish(pending), sent.order)
        return out_TE


def _join(rows_RE: Tensor, gates_R: Tensor) -> Tensor:
    """Rows with their gates behind them, bit for bit: a float32 gate is two columns of bfloat16 rows."""
    return torch.cat((rows_RE, gates_R[:, None].contiguous().view(rows_RE.dtype)), 1)


def _part(message_RM: Tensor, width: int, gates: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of `_join`."""
    rows_RE, columns_RC = message_RM.split((width, message_RM.shape[1] - width), 1)
    return rows_RE, columns_RC.contiguous().view(gates)[:, 0]


class _Joined(torch.autograd.Function):
    """`_join`, whose gradients come joined likewise."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, gates_R: Tensor) -> Tensor:
        ctx.width, ctx.gates = rows_RE.shape[1], gates_R.dtype
        return _join(rows_RE, gates_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _part(grads[0], ctx.width, ctx.gates)


class _Parted(torch.autograd.Function):
    """`_part`, whose backward joins the gradients."""

    @staticmethod
    def forward(ctx: Any, message_RM: Tensor, width: int, gates: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.rows = message_RM.dtype
        return _part(message_RM, width, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0].to(ctx.rows), grads[1]), None, None
