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
from mmspeed.compute.cuda_mixed import exp_rounded

from .base import Implementation, Operator

IGNORED = -100  # the target of a token that counts nothing, as in torch and transformers
CHUNKS = 4  # at least, of which one's logits are in memory
# numbers of a chunk, of 6 bytes in half types: each chunk reads the weight thrice, and its gradient's sum once
MOST_LOGITS = 5 << 26


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
        sums = [_log_sums(x_CE @ weight_VE.mT, place_C) for x_CE, place_C in chunks]
        lse_T, picked_T = (torch.cat(each) for each in zip(*sums, strict=True))
        ctx.save_for_backward(x_TE, weight_VE, place_T, lse_T)
        return lse_T, picked_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """A logit's gradient is exp(logit - lse) times the log-sum-exp's gradient, and the picked one's added.

        In half types the factor goes into the exponent, which one pass then rounds, and its sign to the tokens.
        """
        x_TE, weight_VE, place_T, lse_T = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        dtype, rows = lse_T.dtype, rows_of_chunk(len(x_TE), len(weight_VE))
        half = x_TE.dtype != dtype
        here_T, lse_grad_T = (place_T >= 0) & (place_T < len(weight_VE)), grads[0]
        picked_grad_T = torch.where(here_T, grads[1], 0.0)
        sign_T1 = torch.where(lse_grad_T < 0, -1.0, 1.0).to(x_TE.dtype)[:, None]
        level_T1 = (lse_T - lse_grad_T.abs().log())[:, None] if half else lse_T[:, None]
        grad_x = torch.empty_like(x_TE) if need_x else None
        grad_weight = torch.zeros(weight_VE.shape, dtype=dtype, device=x_TE.device) if need_weight else None
        for start in range(0, len(x_TE), rows):
            part = slice(start, start + rows)
            x_CE, place_C1 = x_TE[part], torch.where(here_T[part], place_T[part], 0)[:, None]
            logits_CV = x_CE @ weight_VE.mT
            picked_C1 = (
                (logits_CV.gather(1, place_C1).to(dtype) - lse_T[part, None]).exp_().mul_(lse_grad_T[part, None])
            )
            picked_C1 += picked_grad_T[part, None]
            if half:
                grad_CV = exp_rounded(logits_CV - level_T1[part], x_TE.dtype)
                x_CE, picked_C1 = x_CE * sign_T1[part], picked_C1 * sign_T1[part]
            else:
                grad_CV = logits_CV.sub_(level_T1[part]).exp_().mul_(lse_grad_T[part, None])
            del logits_CV
            grad_CV.scatter_(1, place_C1, picked_C1.to(x_TE.dtype))
            if grad_x is not None:
                grad_x[part] = grad_CV @ weight_VE
            if grad_weight is not None:
                grad_weight += grad_CV.mT @ x_CE
        if half and grad_x is not None:
            grad_x *= sign_T1
        return grad_x, None if grad_weight is None else grad_weight.to(weight_VE.dtype), None


def _log_sums(logits_CV: Tensor, place_C: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of `eager_linear_log_sums` of logits, which one kernel reads in their own number type."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    here_C = (place_C >= 0) & (place_C < logits_CV.shape[-1])
    place_C1 = torch.where(here_C, place_C, 0)[:, None]
    logit_C = logits_CV.gather(-1, place_C1)[:, 0].to(wide)
    lse_C = logit_C - logits_CV.log_softmax(-1, dtype=wide).gather(-1, place_C1)[:, 0]
    return lse_C, torch.where(here_C, logit_C, 0.0)


def chunked_linear_cross_entropy(x_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks of tokens: at most a quarter of the logits is in memory, in forward and in backward."""
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
