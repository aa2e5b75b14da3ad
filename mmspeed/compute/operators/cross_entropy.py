"""The cross-entropy of a linear layer's logits, without logits in full.

Backward computes the logits of each chunk of tokens again, so that nothing of the size tokens x vocabulary is ever kept.

Legend: T tokens, E width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike

from .base import Implementation, Operator

IGNORED = -100  # the target of a token that counts nothing, as in torch and transformers
CHUNKS = 16  # of which one's logits are in memory
MOST_LOGITS = 1 << 26  # numbers of a chunk


def rows_of_chunk(tokens: int, vocabulary: int) -> int:
    """The number of tokens whose logits are computed at a time."""
    return max(1, min(-(-tokens // CHUNKS), MOST_LOGITS // vocabulary))


def eager_linear_cross_entropy(x_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """(-log softmax(x W^T)[target], log-sum-exp of the logits), (T,) each in float32 or better; 0 and 0 where a target is IGNORED.

    The z-loss of PaLM (Chowdhery et al. 2022) is a multiple of the square of the second.
    """
    dtype = torch.promote_types(x_TE.dtype, torch.float32)
    logits_TV = (x_TE @ weight_VE.mT).to(dtype)
    lse_T = logits_TV.logsumexp(-1)
    counts_T = target_T != IGNORED
    picked_T = logits_TV.gather(-1, torch.where(counts_T, target_T, 0)[:, None])[:, 0]
    zero = torch.zeros((), dtype=dtype, device=x_TE.device)
    return torch.where(counts_T, lse_T - picked_T, zero), torch.where(counts_T, lse_T, zero)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows_of_chunk(len(x_TE), len(weight_VE))
        losses, sums = [], []
        for x_CE, target_C in zip(x_TE.split(rows), target_T.split(rows), strict=True):
            loss_C, lse_C = eager_linear_cross_entropy(x_CE, weight_VE, target_C)
            losses.append(loss_C)
            sums.append(lse_C)
        loss_T, lse_T = torch.cat(losses), torch.cat(sums)
        ctx.save_for_backward(x_TE, weight_VE, target_T, lse_T)
        return loss_T, lse_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TE, weight_VE, target_T, lse_T = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        counts_T = target_T != IGNORED
        loss_grad_T, lse_grad_T = (torch.where(counts_T, grad, 0) for grad in grads)
        dtype, rows = lse_T.dtype, rows_of_chunk(len(x_TE), len(weight_VE))
        grad_x = torch.empty_like(x_TE) if need_x else None
        grad_weight = torch.zeros(weight_VE.shape, dtype=dtype, device=x_TE.device) if need_weight else None
        for start in range(0, len(x_TE), rows):
            part = slice(start, start + rows)
            x_CE = x_TE[part]
            logits_CV = (x_CE @ weight_VE.mT).to(dtype)
            grad_CV = logits_CV.sub_(lse_T[part, None]).exp_().mul_((loss_grad_T[part] + lse_grad_T[part])[:, None])
            grad_CV.scatter_add_(1, torch.where(counts_T[part], target_T[part], 0)[:, None], -loss_grad_T[part, None])
            narrow_CV = grad_CV.to(x_TE.dtype)
            if grad_x is not None:
                grad_x[part] = narrow_CV @ weight_VE
            if grad_weight is not None:
                grad_weight += narrow_CV.mT @ x_CE
        return grad_x, None if grad_weight is None else grad_weight.to(weight_VE.dtype), None


def chunked_linear_cross_entropy(x_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks of tokens: at most a sixteenth of the logits is in memory, in forward and in backward."""
    x_TE, weight_VE = autocast_alike(x_TE, weight_VE)
    return _ChunkedLoss.apply(x_TE, weight_VE, target_T)  # type: ignore[no-any-return]


def _chunked_refuses(x_TE: Tensor, *_: Tensor) -> str:
    return "" if len(x_TE) else "there are no tokens"


linear_cross_entropy = Operator(
    "linear_cross_entropy",
    (
        Implementation("chunked", chunked_linear_cross_entropy, _chunked_refuses),
        Implementation("eager", eager_linear_cross_entropy),
    ),
)
