"""The cross-entropy of a linear layer's logits, without logits in full.

Backward computes the logits of each chunk of tokens again, so that nothing of the size tokens x vocabulary is ever kept. Where the rows of
the weight lie on several processes, each computes the sums of its own rows (`linear_log_sums`), and `losses_of` takes those of all.

Legend: T tokens, E width, V vocabulary, or the rows of it that a process holds, C tokens of a chunk.
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
    return losses_of(*eager_linear_log_sums(x_TE, weight_VE, target_T), target_T)


def losses_of(lse_T: Tensor, picked_T: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """(losses, log-sum-exps) from the log-sum-exp of each token's logits and the logit of its target; 0 where a target is IGNORED."""
    counts_T = target_T != IGNORED
    return torch.where(counts_T, lse_T - picked_T, 0.0), torch.where(counts_T, lse_T, 0.0)


def eager_linear_log_sums(x_TE: Tensor, weight_VE: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp of the logits x W^T, the logit at a place among these rows), (T,) each in float32 or better.

    place_T: any whole number; where it is no row of the weight, the logit lies with another process, and is 0 here.
    """
    logits_TV = (x_TE @ weight_VE.mT).to(torch.promote_types(x_TE.dtype, torch.float32))
    here_T = (place_T >= 0) & (place_T < len(weight_VE))
    picked_T = logits_TV.gather(-1, torch.where(here_T, place_T, 0)[:, None])[:, 0]
    return logits_TV.logsumexp(-1), torch.where(here_T, picked_T, 0.0)


class _ChunkedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_VE: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows_of_chunk(len(x_TE), len(weight_VE))
        chunks = zip(x_TE.split(rows), place_T.split(rows), strict=True)
        sums = [eager_linear_log_sums(x_CE, weight_VE, place_C) for x_CE, place_C in chunks]
        lse_T, picked_T = (torch.cat(each) for each in zip(*sums, strict=True))
        ctx.save_for_backward(x_TE, weight_VE, place_T, lse_T)
        return lse_T, picked_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TE, weight_VE, place_T, lse_T = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        here_T = (place_T >= 0) & (place_T < len(weight_VE))
        lse_grad_T, picked_grad_T = grads[0], torch.where(here_T, grads[1], 0.0)
        dtype, rows = lse_T.dtype, rows_of_chunk(len(x_TE), len(weight_VE))
        grad_x = torch.empty_like(x_TE) if need_x else None
        grad_weight = torch.zeros(weight_VE.shape, dtype=dtype, device=x_TE.device) if need_weight else None
        for start in range(0, len(x_TE), rows):
            part = slice(start, start + rows)
            x_CE = x_TE[part]
            logits_CV = (x_CE @ weight_VE.mT).to(dtype)
            grad_CV = logits_CV.sub_(lse_T[part, None]).exp_().mul_(lse_grad_T[part, None])
            grad_CV.scatter_add_(1, torch.where(here_T[part], place_T[part], 0)[:, None], picked_grad_T[part, None])
            narrow_CV = grad_CV.to(x_TE.dtype)
            if grad_x is not None:
                grad_x[part] = narrow_CV @ weight_VE
            if grad_weight is not None:
                grad_weight += narrow_CV.mT @ x_CE
        return grad_x, None if grad_weight is None else grad_weight.to(weight_VE.dtype), None


def chunked_linear_cross_entropy(x_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks of tokens: at most a sixteenth of the logits is in memory, in forward and in backward."""
    return losses_of(*chunked_linear_log_sums(x_TE, weight_VE, target_T), target_T)


def chunked_linear_log_sums(x_TE: Tensor, weight_VE: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of `eager_linear_log_sums` in such chunks."""
    x_TE, weight_VE = autocast_alike(x_TE, weight_VE)
    return _ChunkedSums.apply(x_TE, weight_VE, place_T)  # type: ignore[no-any-return]


def _chunked_refuses(x_TE: Tensor, *_: Tensor) -> str:
    return "" if len(x_TE) else "there are no tokens"


linear_cross_entropy = Operator(
    "linear_cross_entropy",
    (
        Implementation("chunked", chunked_linear_cross_entropy, _chunked_refuses),
        Implementation("eager", eager_linear_cross_entropy),
    ),
)
linear_log_sums = Operator(
    "linear_log_sums",
    (
        Implementation("chunked", chunked_linear_log_sums, _chunked_refuses),
        Implementation("eager", eager_linear_log_sums),
    ),
)
