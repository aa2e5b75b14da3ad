"""Permute tokens into the order of their experts (mixture of experts), and combine the experts' outputs per token.

Each token is copied once for each of its K experts. The copies, or rows, are sorted by expert, so that each expert's rows are contiguous.
Where a token goes once for several of its experts, some pairs of token and choice become no row.

Legend: T tokens, K experts chosen per token (top-k), P = T x K pairs, R rows (P, or fewer), G experts, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspeed.compute import npu_operators

from .base import Implementation, Operator


@dataclass(frozen=True)
class RowOrder:
    """The rows that (token, choice) pairs become, in an order.

    order_R: the pair of each row: row r is choice `order_R[r] % K` of token `order_R[r] // K`.
    place_TK: the row of each pair; R for one that becomes none.
    """

    order_R: Tensor
    place_TK: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token that each row is a copy of, (R,)."""
        return self.order_R // self.place_TK.shape[1]


@dataclass(frozen=True)
class ExpertOrder(RowOrder):
    """The permutation that sorts all pairs by expert. ends_G: the end (exclusive) of each expert's rows."""

    ends_G: Tensor


def order_rows(goes_TK: Tensor, rows: int) -> RowOrder:
    """Sort pairs, stably, by the numbers of where they go; those behind the first `rows` become none. Never waits for the device."""
    flat_P = goes_TK.flatten()
    order_R = flat_P.argsort(stable=True)[:rows]
    place_P = torch.full_like(flat_P, rows, dtype=torch.int64)
    place_P.scatter_(0, order_R, torch.arange(rows, device=flat_P.device))
    return RowOrder(order_R, place_P.view_as(goes_TK))


def order_by_expert(expert_TK: Tensor, experts: int) -> ExpertOrder:
    """Sort (token, choice) pairs by expert, stably: rows of one expert keep the order of their tokens. Never waits for the device."""
    flat_R = expert_TK.flatten()
    rows = order_rows(expert_TK, len(flat_R))
    counts_G = torch.zeros(experts, dtype=torch.int64, device=flat_R.device)
    counts_G = counts_G.scatter_add_(0, flat_R.long(), torch.ones_like(flat_R, dtype=torch.int64))
    return ExpertOrder(rows.order_R, rows.place_TK, counts_G.cumsum(0).to(torch.int32))


def _copies(x_TE: Tensor, token_R: Tensor) -> Tensor:
    return x_TE.index_select(0, token_R)


def _sums(rows_RE: Tensor, place_TK: Tensor) -> Tensor:
    if len(rows_RE) < place_TK.numel():  # a pair without a row adds 0
        rows_RE = torch.cat((rows_RE, rows_RE.new_zeros(1, rows_RE.shape[1])))
    return rows_RE.index_select(0, place_TK.flatten()).unflatten(0, place_TK.shape).sum(1)


class _Permute(torch.autograd.Function):
    """Gathers each row's token. Backward sums the gradients of a token's rows in the order of its choices, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, token_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return _copies(x_TE, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grads[0], *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """Sums each token's rows. Backward copies the token's gradient to each of them."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, token_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sums(rows_RE, place_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _copies(grads[0], *ctx.saved_tensors), None, None


def gathered_permute(x_TE: Tensor, order: RowOrder) -> Tensor:
    """Copy each token once for each of its rows: row r of `rows_RE` is `x_TE[order.tokens[r]]`."""
    return _Permute.apply(x_TE, order.tokens, order.place_TK)  # type: ignore[no-any-return]


def eager_permute(x_TE: Tensor, order: RowOrder) -> Tensor:
    """`gathered_permute` by plain indexing, whose backward accumulates rows into tokens one by one."""
    return x_TE[order.tokens]


def gathered_combine(rows_RE: Tensor, order: RowOrder) -> Tensor:
    """Sum the rows of each token back into one, `out_TE`; terms are added in the order of the choices."""
    return _Combine.apply(rows_RE, order.tokens, order.place_TK)  # type: ignore[no-any-return]


def eager_combine(rows_RE: Tensor, order: RowOrder) -> Tensor:
    """`gathered_combine` by `index_add`, which accumulates rows into tokens one by one."""
    return rows_RE.new_zeros(len(order.place_TK), rows_RE.shape[1]).index_add(0, order.tokens, rows_RE)


def fused_permute(x_TE: Tensor, order: RowOrder) -> Tensor:
    """`gathered_permute` by a kernel."""
    return npu_operators.permute(x_TE, order.place_TK)


def fused_combine(rows_RE: Tensor, order: RowOrder) -> Tensor:
    """`gathered_combine` by a kernel, which adds terms in an order of its own."""
    return npu_operators.combine(rows_RE, order.place_TK)


def _fused_refuses(operator: str, x: Tensor, order: RowOrder) -> str:
    return npu_operators.permutation_refuses(operator, x, order.place_TK, len(order.order_R))


permute = Operator(
    "permute",
    (
        Implementation("fused", fused_permute, partial(_fused_refuses, "npu_moe_token_permute")),
        Implementation("gather", gathered_permute),
        Implementation("eager", eager_permute),
    ),
)
combine = Operator(
    "combine",
    (
        Implementation("fused", fused_combine, partial(_fused_refuses, "npu_moe_token_unpermute")),
        Implementation("gather", gathered_combine),
        Implementation("eager", eager_combine),
    ),
)
