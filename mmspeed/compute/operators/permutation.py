"""Permute tokens into the order of their experts (mixture of experts), and combine the experts' outputs per token.

Each token is copied once for each of its K experts. The R = T x K copies, or rows, are sorted by expert, so that each expert's rows are
contiguous.

Legend: T tokens, K experts chosen per token (top-k), R = T x K rows, G experts, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Implementation, Operator


@dataclass(frozen=True)
class ExpertOrder:
    """The permutation that sorts (token, choice) pairs by expert.

    order_R: the pair in each sorted row: row r is choice `order_R[r] % K` of token `order_R[r] // K`.
    place_R: the inverse permutation: the sorted row of each pair.
    ends_G: the end (exclusive) of each expert's rows.
    choices: K.
    """

    order_R: Tensor
    place_R: Tensor
    ends_G: Tensor
    choices: int

    @property
    def tokens(self) -> Tensor:
        """The token that each sorted row is a copy of, (R,)."""
        return self.order_R // self.choices


def order_by_expert(expert_TK: Tensor, experts: int) -> ExpertOrder:
    """Sort (token, choice) pairs by expert, stably: rows of one expert keep the order of their tokens. Never waits for the device."""
    flat_R = expert_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(flat_R), device=flat_R.device))
    counts_G = torch.zeros(experts, dtype=torch.int64, device=flat_R.device)
    counts_G = counts_G.scatter_add_(0, flat_R.long(), torch.ones_like(flat_R, dtype=torch.int64))
    return ExpertOrder(order_R, place_R, counts_G.cumsum(0).to(torch.int32), expert_TK.shape[1])


class _Permute(torch.autograd.Function):
    """Gathers each row's token. Backward sums the gradients of a token's K rows in the order of its choices, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, token_R: Tensor, place_R: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.choices = choices
        return x_TE.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        return grads[0].index_select(0, place_R).unflatten(0, (-1, ctx.choices)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Sums each token's K rows. Backward copies the token's gradient to each of them."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, token_R: Tensor, place_R: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(token_R)
        return rows_RE.index_select(0, place_R).unflatten(0, (-1, choices)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (token_R,) = ctx.saved_tensors
        return grads[0].index_select(0, token_R), None, None, None


def gathered_permute(x_TE: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token once per chosen expert, sorted by expert: row r of `rows_RE` is `x_TE[order.tokens[r]]`."""
    return _Permute.apply(x_TE, order.tokens, order.place_R, order.choices)  # type: ignore[no-any-return]


def eager_permute(x_TE: Tensor, order: ExpertOrder) -> Tensor:
    """`gathered_permute` by plain indexing, whose backward accumulates rows into tokens one by one."""
    return x_TE[order.tokens]


def gathered_combine(rows_RE: Tensor, order: ExpertOrder) -> Tensor:
    """Sum the K rows of each token back into one, `out_TE`; terms are added in the order of the choices."""
    return _Combine.apply(rows_RE, order.tokens, order.place_R, order.choices)  # type: ignore[no-any-return]


def eager_combine(rows_RE: Tensor, order: ExpertOrder) -> Tensor:
    """`gathered_combine` by `index_add`, which accumulates rows into tokens one by one."""
    tokens = len(rows_RE) // order.choices
    return rows_RE.new_zeros(tokens, rows_RE.shape[1]).index_add(0, order.tokens, rows_RE)


permute = Operator("permute", (Implementation("gather", gathered_permute), Implementation("eager", eager_permute)))
combine = Operator("combine", (Implementation("gather", gathered_combine), Implementation("eager", eager_combine)))
