"""Computing in parts what is too wide to be there at once: the hidden layer of an MLP, the logits of a vocabulary.

Legend: N tokens, E width, V vocabulary, P tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(run: Callable[[Tensor], Tensor], x: Tensor, dim: int, size: int) -> Tensor:
    """`run(x)` of a `run` that treats places along `dim` apart, `size` of them at a time.

    Where gradients are taken, each part is computed again in backward, up to what its backward needs, so that what `run` makes exists
    for one part only. `run` draws no random numbers and decides nothing (`replay.settle`). A matrix product of fewer rows may be summed
    in another order; weights' gradients are sums over the parts. Raises ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"a part has at least one place, not {size}")
    parts = x.split(size, dim)
    with _casts_apart():
        if torch.is_grad_enabled():
            done = [checkpoint(run, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        else:
            done = [run(part) for part in parts]
    return done[0] if len(done) == 1 else torch.cat(done, dim)


@contextmanager
def _casts_apart() -> Iterator[None]:
    """Autocast casts a weight for each part: gradients of one cast that all share would be summed in its dtype, not in float32."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss and, while a part's logits are there, its gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        labels_N: Tensor,
        chunk: int,
        ignore_index: int,
        mean: bool,
        learns: bool,
    ) -> Tensor:
        wants_hidden, wants_weight = (learns and wanted for wanted in ctx.needs_input_grad[:2])
        divisor = (labels_N != ignore_index).sum() if mean else torch.ones((), device=hidden_NE.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden_NE.device)
        grad_hidden_NE = torch.empty_like(hidden_NE) if wants_hidden else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(labels_N), chunk):
            rows = slice(start, start + chunk)
            hidden_PE, labels_P = hidden_NE[rows], labels_N[rows]
            log_PV = (hidden_PE @ weight_VE.t()).float().log_softmax(-1)
            real_P = labels_P != ignore_index
            safe_P1 = torch.where(real_P, labels_P, 0)[:, None]
            total -= torch.where(real_P, log_PV.gather(1, safe_P1)[:, 0], 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            grad_PV = log_PV.exp_()  # softmax - one at the label
            grad_PV.scatter_add_(1, safe_P1, torch.full_like(safe_P1, -1.0, dtype=torch.float32))
            grad_PV *= (real_P / divisor)[:, None]
            grad_PV = grad_PV.to(hidden_NE.dtype)
            if grad_hidden_NE is not None:
                grad_hidden_NE[rows] = grad_PV @ weight_VE
            if grad_weight_VE is not None:
                grad_weight_VE += grad_PV.t() @ hidden_PE
        ctx.save_for_backward(grad_hidden_NE, None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype))
        return total / divisor if mean else total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def chunked_cross_entropy(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    chunk: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy (float32) of `hidden_NE @ weight_VE.T` against `labels_N`, whose logits exist for `chunk` tokens at a time.

    As `F.cross_entropy` of the whole logits, up to the order of sums; the mean over no label is NaN there and here. Both gradients are
    made in the forward pass, from each part's logits, with as many matrix products as the plain way has (Hsu et al., "Liger Kernel",
    2024), so it is differentiable once. torch 2.13 has `F.linear_cross_entropy`; 2.11 has not.

    Raises ValueError for shapes that do not fit, and for labels that no place of the vocabulary has, where they can be looked at without
    waiting for a device.
    """
    if hidden_NE.dim() != 2 or labels_N.shape != hidden_NE.shape[:1] or weight_VE.shape[1:] != hidden_NE.shape[1:]:
        raise ValueError(
            f"shapes {tuple(hidden_NE.shape)}, {tuple(weight_VE.shape)}, {tuple(labels_N.shape)} are not (N, E), (V, E), (N)"
        )
    if chunk < 1 or reduction not in ("mean", "sum"):
        raise ValueError(f"chunk {chunk} must be positive, and reduction {reduction!r} mean or sum")
    if labels_N.device.type == "cpu" and labels_N.numel():
        real = labels_N[labels_N != ignore_index]
        if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < len(weight_VE):
            raise ValueError(
                f"labels lie in {int(real.min())}..{int(real.max())}, the vocabulary in 0..{len(weight_VE) - 1}"
            )
    learns = torch.is_grad_enabled()  # inside of a function it is off
    return _ChunkedCrossEntropy.apply(hidden_NE, weight_VE, labels_N, chunk, ignore_index, reduction == "mean", learns)
