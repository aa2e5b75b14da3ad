"""Send the scaled-dot-product attention of one module to the hybrid of Ulysses and ring, for as long as its forward runs.

Legend: B batch, A heads, N queries of this rank, M keys of this rank, D head width.

A `TorchFunctionMode` is entered around the forward of one module and left after it: nothing of torch is patched, and other
modules, threads and models never meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmspeed.errors import UserError
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, hybrid_attention

_HIDDEN_BELOW = -1e4  # additive masks at or below this hide a key, as -inf does: exp(-1e4) is 0 in every float type


class HybridAttention(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` attends over the sequence of all ranks.

    `q_sizes`, `k_sizes`: local lengths on all ranks of the group, ring outermost. `where` names the module in errors.
    `calls` counts the attentions that were taken over: a module that made none ran some other kernel.
    """

    def __init__(
        self,
        axes: SequenceAxes,
        place: int,
        q_sizes: Sequence[int],
        k_sizes: Sequence[int],
        causal_ok: bool,
        where: str,
    ) -> None:
        super().__init__()
        self.axes, self.place, self.where, self.causal_ok = axes, place, where, causal_ok
        self.q_sizes, self.k_sizes = tuple(q_sizes), tuple(k_sizes)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """`F.scaled_dot_product_attention`'s own arguments, for this rank's (B, A, N, D) and (B, A, M, D) -> (B, A, N, D)."""
        if query.ndim != 4:
            raise UserError(
                f"{self.where}: attention over {tuple(query.shape)}; sequence parallelism takes (B, A, N, D)"
            )
        if dropout_p > 0:
            raise UserError(f"{self.where}: attention dropout {dropout_p} is not computed across ranks; set it to 0")
        if is_causal and not self.causal_ok:
            raise UserError(
                f"{self.where}: causal attention across ranks takes one sequence, and a plan with causal=True"
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(f"{self.where}: {key.shape[1]} key heads for {query.shape[1]}, without enable_gqa")
        for name, tensor, sizes in (("queries", query, self.q_sizes), ("keys", key, self.k_sizes)):
            if tensor.shape[2] != sizes[self.place]:
                raise UserError(
                    f"{self.where}: attention met {tensor.shape[2]} {name} where the plan has {sizes[self.place]} on this "
                    "rank; name other splits for this module in the plan, or leave it out if it attends to whole text"
                )
        mask = None if attn_mask is None else key_mask(attn_mask, query.shape[0], key.shape[2], self.where)
        return hybrid_attention(
            query, key, value, mask, self.axes, self.q_sizes, self.k_sizes, causal=is_causal, scale=scale
        )  # fmt: skip


def key_mask(mask: torch.Tensor, batch: int, keys: int, where: str = "attention") -> torch.Tensor:
    """A mask that `F.scaled_dot_product_attention` takes, as a bool mask (B, M) of keys: True counts.

    Taken: bool, or numbers that are 0 or hide a key (-inf, -1e4 and below); broadcast over heads and queries. Raises
    UserError for a mask that differs by query or head, or that adds a bias.
    """
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    whole = mask.reshape(shape)
    if shape[2] != 1 or shape[3] not in (1, keys) or shape[0] not in (1, batch):
        raise UserError(
            f"{where}: an attention mask of shape {tuple(mask.shape)}; across ranks only masks of keys work, the same for "
            f"every query: (B, 1, 1, {keys})"
        )
    if shape[1] != 1 and not bool((whole == whole[:, :1]).all()):
        raise UserError(
            f"{where}: an attention mask that differs from head to head; across ranks only masks of keys work"
        )
    row_BM = whole[:, 0, 0].expand(batch, keys)
    if row_BM.dtype == torch.bool:
        return row_BM
    hidden_BM = row_BM <= _HIDDEN_BELOW
    if bool(((row_BM != 0) & ~hidden_BM).any()):
        raise UserError(f"{where}: an attention mask that adds a bias; across ranks a mask may only show or hide keys")
    return ~hidden_BM
