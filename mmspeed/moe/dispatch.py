"""Send tokens to the processes that hold their experts, and the experts' outputs back (expert parallelism; GShard, Lepikhin et al. 2020).

Dropless: every choice of a token becomes a row, and every row is computed. A process sends its rows sorted by expert, hence by process;
before them go the counts by process and expert, which the host reads once. A row carries its gate, so that experts weigh their hidden units
before the second product, as on one process.

Between nodes a token need not go once for each of its experts (`HierarchicalDispatcher`): it goes once to each node that has some of them,
to the process with the sender's place within its node, which sends it on to the others of the node and sums what comes back from them.

Where an expert's hidden units are split over processes (`etp`), each of these gathers the rows that came to all of them, and the outputs of
its units are summed as they are scattered back.

Legend: T tokens, K experts of a token, R rows, E width, G experts, P processes, L = G / P experts of a process, Z rows that come, M width
of a message; O nodes, I processes of a node, H = I x L experts of a node, U tokens that come to this process from others of its place;
S processes with parts of the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.comm import (
    Axis,
    PendingExchange,
    RowCounts,
    all_gather,
    finish,
    on_host,
    reduce_scatter,
    row_counts,
    start_rows,
    swap_rows,
)
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.operators.permutation import ExpertOrder, RowOrder, combine, order_by_expert, order_rows, permute
from mmspeed.graphs import outside_graphs
from mmspeed.moe.balance import Slots, order_by_slot
from mmspeed.replay import record_or_replay


class Dispatcher:
    """What kinds of dispatchers share.

    etp: the processes that hold parts of the same experts. slots: what experts' rows go to; None: each expert to its place in order.
    """

    slots: Slots | None = None

    def __init__(self, experts: int, etp: Axis | None) -> None:
        self.experts, self.etp = experts, etp or Axis.alone("etp")

    def __deepcopy__(self, memo: Any) -> Dispatcher:
        return self  # process groups cannot be copied, and nothing in it belongs to one copy

    def _gathered(
        self, rows_ZE: Tensor, gates_Z1: Tensor, come_SPL: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all of `etp`, their gates and experts, numbered on this process; they come by process, by sender, then by expert."""
        here_L = torch.arange(come_SPL.shape[-1], device=come_SPL.device).repeat(come_SPL[..., 0].numel())
        expert_Z = here_L.repeat_interleave(come_SPL.flatten(), output_size=sum(sizes))
        rows_ZE, gates_Z1 = (all_gather(each, self.etp, 0, sizes) for each in (rows_ZE, gates_Z1))
        return rows_ZE, gates_Z1, expert_Z[:, None]

    def _summed(self, out_ZE: Tensor, sizes: Sequence[int]) -> Tensor:
        """The outputs of this process's rows, summed over `etp`."""
        return reduce_scatter(out_ZE, self.etp, 0, sizes)


@dataclass(frozen=True)
class Dispatched:
    """Rows on their way to experts.

    order: that of the rows sent. counts: rows by process. come_SPL: rows that come to each of `etp`, by sender and expert.
    """

    order: ExpertOrder
    counts: RowCounts
    come_SPL: Tensor
    width: int
    gates: torch.dtype
    pending: PendingExchange

    @property
    def kinds(self) -> tuple[int, ...]:
        """The rows that come for each expert of this process, then for its copy if there is one."""
        return self.counts.kinds


class FlatDispatcher(Dispatcher):
    """One exchange there and one back between all processes of an axis, of which each holds G / P experts in order."""

    def __init__(self, axis: Axis, experts: int, etp: Axis | None = None) -> None:
        super().__init__(experts, etp)
        self.axis = axis

    def start(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> Dispatched:
        """Start sending each token to its experts; rows travel in the dtype of products."""
        (x_TE,) = autocast_alike(x_TE)
        if self.slots is None:
            order = order_by_expert(expert_TK, self.experts)
        else:
            order, _ = order_by_slot(expert_TK, self.slots, self.experts, self.axis.rank, self.axis.size)
        counts, come_SPL = self._counts(order)
        message_RM: Tensor = _Joined.apply(permute(x_TE, order), weights_TK.flatten()[order.order_R][:, None])
        pending = start_rows(message_RM, self.axis, counts, "dispatch")
        return Dispatched(order, counts, come_SPL, x_TE.shape[1], weights_TK.dtype, pending)

    def _counts(self, order: ExpertOrder) -> tuple[RowCounts, Tensor]:
        """The rows by process, and those that come to each of `etp`, by sender and expert: one message, one read by the host."""
        ends_G = order.ends_G.long()
        counts_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
        return row_counts(counts_G.view(self.axis.size, -1), self.axis, self.etp)

    def finish(self, sent: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
        """(rows_ZE, gates_Z1, expert_Z1): the rows that came, by process and then by expert, each as a token of one choice."""
        rows_ZE, gates_Z1 = _Parted.apply(finish(sent.pending), sent.width, sent.gates)
        return self._gathered(rows_ZE, gates_Z1, sent.come_SPL, sent.counts.beside)

    def start_back(self, sent: Dispatched, out_ZE: Tensor) -> PendingExchange:
        """Start sending the experts' outputs back."""
        return start_rows(self._summed(out_ZE, sent.counts.beside), self.axis, sent.counts.back(), "combine")

    def finish_back(self, sent: Dispatched, pending: PendingExchange) -> Tensor:
        """The sum of each token's outputs, (T, E)."""
        out_TE: Tensor = combine(finish(pending), sent.order)
        return out_TE


@dataclass
class DispatchedByNode:
    """Rows on their way to experts by way of their nodes; what `finish` learns is added by it."""

    own: RowOrder
    by_node: RowCounts
    by_inner: RowCounts
    come_SIL: Tensor
    shape: tuple[int, int]  # of a token: width, choices
    gates: torch.dtype
    pending: PendingExchange
    onward: RowOrder | None = None

    @property
    def kinds(self) -> tuple[int, ...]:
        """As of `Dispatched`."""
        return self.by_inner.kinds


class HierarchicalDispatcher(Dispatcher):
    """An exchange between nodes, in which a token crosses once to each node, and one within the node; outputs are summed there first.

    `outer`: the nodes, as processes with this one's place in theirs; `inner`: the processes of this node.
    """

    def __init__(self, outer: Axis, inner: Axis, experts: int, etp: Axis | None = None) -> None:
        super().__init__(experts, etp)
        self.outer, self.inner = outer, inner

    def start(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> DispatchedByNode:
        """Start sending each token to the nodes of its experts."""
        (x_TE,) = autocast_alike(x_TE)
        slots = self.experts
        if self.slots is not None:
            rank = self.outer.rank * self.inner.size + self.inner.rank
            _, expert_TK = order_by_slot(expert_TK, self.slots, self.experts, rank, self.outer.size * self.inner.size)
            slots = len(self.slots.expert_S)
        nodes, of_node = self.outer.size, slots // self.outer.size
        node_TK = expert_TK // of_node
        goes_TO = torch.zeros((len(expert_TK), nodes), dtype=torch.bool, device=expert_TK.device).scatter_(
            1, node_TK, True
        )
        by_node, by_inner, come_SIL = self._counts(goes_TO, expert_TK, slots)
        node_O = torch.arange(nodes, device=expert_TK.device)
        own = order_rows(torch.where(goes_TO, node_O, nodes), sum(by_node.sends))
        here_RK = node_TK[own.tokens] == (own.order_R % nodes)[:, None]
        ids_RK = torch.where(here_RK, expert_TK[own.tokens] % of_node, of_node)
        gates_RK = torch.where(here_RK, permute(weights_TK, own), 0.0)
        message_RM = _Joined.apply(permute(x_TE, own), gates_RK)
        message_RM = torch.cat((message_RM, _columns(ids_RK.to(torch.int32), message_RM.dtype)), 1)
        pending = start_rows(message_RM, self.outer, by_node, "dispatch")
        shape = x_TE.shape[1], expert_TK.shape[1]
        return DispatchedByNode(own, by_node, by_inner, come_SIL, shape, weights_TK.dtype, pending)

    @outside_graphs
    def _counts(self, goes_TO: Tensor, expert_TK: Tensor, slots: int) -> tuple[RowCounts, RowCounts, Tensor]:
        """Rows by node and within this one, and those that come by process of this node and expert: two messages, one read by the host."""
        outer, inner = self.outer, self.inner

        def exchanged() -> tuple[RowCounts, RowCounts, Tensor]:
            with torch.no_grad():
                loads_G = torch.zeros(slots, dtype=torch.int64, device=expert_TK.device)
                loads_G.scatter_add_(0, expert_TK.flatten(), torch.ones_like(expert_TK).flatten())
                out_OC = torch.cat((goes_TO.sum(0)[:, None], loads_G.view(outer.size, -1)), 1)
                ones = RowCounts((1,) * outer.size, (1,) * outer.size)
                in_OC = swap_rows(out_OC, outer, ones, "counts")
                ones = RowCounts((1,) * inner.size, (1,) * inner.size)
                out_IL = in_OC[:, 1:].sum(0).view(inner.size, -1)
                in_IL = swap_rows(out_IL, inner, ones, "counts")
                in_SIL = all_gather(in_IL[None], self.etp, 0)
                sums = out_OC[:, 0], in_OC[:, 0], out_IL.sum(1), in_IL.sum(1), in_SIL.sum((1, 2)), in_SIL.sum((0, 1))
                o_sends, o_comes, i_sends, i_comes, *come = on_host(sums)
            return RowCounts(o_sends, o_comes), RowCounts(i_sends, i_comes, *come), in_SIL

        return record_or_replay(exchanged)[0]

    def finish(self, sent: DispatchedByNode) -> tuple[Tensor, Tensor, Tensor]:
        """As of `FlatDispatcher`; tokens that came to this node go on to their experts."""
        (width, choices), message_UM = sent.shape, finish(sent.pending)
        ids_columns = choices * 4 // message_UM.element_size()
        rows_UM, ids_UM = message_UM.split((message_UM.shape[1] - ids_columns, ids_columns), 1)
        x_UE, gates_UK = _Parted.apply(rows_UM, width, sent.gates)
        ids_UK = ids_UM.detach().contiguous().view(torch.int32).long()
        sent.onward = onward = order_rows(ids_UK, sum(sent.by_inner.sends))
        rows_RE = permute(x_UE, onward)
        message_RM = _Joined.apply(rows_RE, gates_UK.flatten()[onward.order_R][:, None])
        message_ZM = swap_rows(message_RM, self.inner, sent.by_inner, "dispatch")
        rows_ZE, gates_Z1 = _Parted.apply(message_ZM, width, sent.gates)
        return self._gathered(rows_ZE, gates_Z1, sent.come_SIL, sent.by_inner.beside)

    def start_back(self, sent: DispatchedByNode, out_ZE: Tensor) -> PendingExchange:
        """Bring outputs back to the process that a token came through, sum them, and start sending the sums home."""
        assert sent.onward is not None
        out_RE = swap_rows(self._summed(out_ZE, sent.by_inner.beside), self.inner, sent.by_inner.back(), "combine")
        sums_UE = combine(out_RE, sent.onward)
        return start_rows(sums_UE, self.outer, sent.by_node.back(), "combine")

    def finish_back(self, sent: DispatchedByNode, pending: PendingExchange) -> Tensor:
        """The sum of each token's outputs, (T, E)."""
        out_TE: Tensor = combine(finish(pending), sent.own)
        return out_TE


def _columns(values_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers bit for bit as columns of another number type: a float32 one is two of bfloat16."""
    return values_RC.contiguous().view(dtype)


def _join(rows_RE: Tensor, gates_RC: Tensor) -> Tensor:
    """Rows with their gates behind them."""
    return torch.cat((rows_RE, _columns(gates_RC, rows_RE.dtype)), 1)


def _part(message_RM: Tensor, width: int, gates: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of `_join`."""
    rows_RE, columns_RM = message_RM.split((width, message_RM.shape[1] - width), 1)
    return rows_RE, _columns(columns_RM, gates)


class _Joined(torch.autograd.Function):
    """`_join`, whose gradients come joined likewise."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, gates_RC: Tensor) -> Tensor:
        ctx.width, ctx.gates = rows_RE.shape[1], gates_RC.dtype
        return _join(rows_RE, gates_RC)

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
