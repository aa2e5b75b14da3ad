"""Compute in parts what is too wide to hold at once: the hidden layer of an MLP.

Legend: N tokens, E width, M hidden units, P tokens of a part, Q hidden units of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Linear = tuple[Tensor, Tensor | None]  # the weight (out, in) and the bias of a linear layer
# parts are multiples of these: kernels sum the last few rows or columns of a matrix, and narrow ones, in another order
ROWS, UNITS = 16, 64


def in_chunks(run: Callable[[Tensor], Tensor], x: Tensor, dim: int, size: int) -> Tensor:
    """The result of `run(x)`, for a `run` that treats places along `dim` independently, `size` of them at a time.

    Where gradients are taken, each part is computed again in backward, up to what its backward needs, so that the tensors of `run` exist
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


def _even_parts(whole: int, size: int, multiple: int) -> list[int]:
    """The sizes of even parts of about `size`: multiples of `multiple`, with the rest in the last, which is at least one multiple."""
    parts = max(1, -(-whole // size))
    each = -(-whole // (parts * multiple)) * multiple or multiple
    full, rest = divmod(whole, each)
    if full and rest < multiple:
        return [each] * (full - 1) + [each + rest]
    return [each] * full + [rest]


def _parts(x_NE: Tensor, size: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = x_NE.split(_even_parts(len(x_NE), size, ROWS))
    return parts


def chunked_mlp(x_NE: Tensor, up: Linear, act: Callable[[Tensor], Tensor], down: Linear, size: int) -> Tensor:
    """The MLP `linear(act(linear(x, up)), down)`, whose hidden layer exists for about `size` of N tokens at a time, in both passes.

    Every number is a sum over the same terms as in the whole MLP, so results and gradients differ by rounding alone: where a library sums
    the rows and columns of products of these shapes in one order, however many there are, the bits are the whole MLP's too. That depends
    on the device, its library and its threads, not on this function.

    Backward goes over parts of the tokens for the gradient of x, and over parts of the
    hidden units, 64 or more, for those of the weights, which are sums over all tokens: it computes the first product twice again and the
    hidden layer's gradient once more, 9 products in all where the plain MLP has 6 and `in_chunks` 7. `act` treats each number apart.

    Differentiable once. Raises ValueError for a size below 1, and for tokens of another dtype than the weights without autocast.
    """
    if size < 1:
        raise ValueError(f"a part has at least one place, not {size}")
    kind, weights = x_NE.device.type, [each for each in (*up, *down) if each is not None]
    wide = torch.float64 in {each.dtype for each in (x_NE, *weights)}  # which autocast leaves alone
    if not wide and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x_NE = x_NE.to(torch.get_autocast_dtype(kind))
    else:
        other = next((each.dtype for each in weights if each.dtype != x_NE.dtype), None)
        if other is not None:
            raise ValueError(f"tokens of {x_NE.dtype} do not match weights of {other}")
    out: Tensor = _ChunkedMlp.apply(x_NE, *up, *down, act, size)
    return out


class _ChunkedMlp(torch.autograd.Function):
    """An MLP in parts that keeps its input and the weights; casts of the weights to the input's dtype are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NE: Tensor,
        up_ME: Tensor,
        up_M: Tensor | None,
        down_EM: Tensor,
        down_E: Tensor | None,
        act: Callable[[Tensor], Tensor],
        size: int,
    ) -> Tensor:
        ctx.save_for_backward(x_NE, up_ME, up_M, down_EM)
        ctx.act, ctx.size = act, size
        up_ME, up_M, down_EM, down_E = (_cast(each, x_NE.dtype) for each in (up_ME, up_M, down_EM, down_E))
        parts = [F.linear(act(F.linear(x_PE, up_ME, up_M)), down_EM, down_E) for x_PE in _parts(x_NE, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: recomputation gives it once
        x_NE, up_ME, up_M, down_EM = (_cast(each, saved[0].dtype) for each in saved)
        wants_x, wants_up, wants_up_bias, wants_down, wants_down_bias = ctx.needs_input_grad[:5]
        grad_x, grad_up, grad_up_bias, grad_down = (
            torch.empty_like(of) if wanted else None
            for wanted, of in zip((wants_x, wants_up, wants_up_bias, wants_down), saved, strict=True)
        )
        if grad_x is not None:
            pieces = (_parts(each, ctx.size) for each in (x_NE, grad_NE, grad_x))
            for x_PE, grad_PE, out_PE in zip(*pieces, strict=True):
                hidden_PM = F.linear(x_PE, up_ME, up_M)
                out_PE.copy_(_through(ctx.act, hidden_PM, grad_PE @ down_EM) @ up_ME)
                del hidden_PM  # before the next one is made
        if wants_up or wants_up_bias or wants_down:
            for units in _unit_parts(len(up_ME), len(x_NE), ctx.size):
                hidden_NQ = F.linear(x_NE, up_ME[units], None if up_M is None else up_M[units])
                if grad_down is not None:
                    grad_down[:, units] = grad_NE.t() @ ctx.act(hidden_NQ)
                if wants_up or wants_up_bias:
                    grad_NQ = _through(ctx.act, hidden_NQ, grad_NE @ down_EM[:, units])
                    if grad_up is not None:
                        grad_up[units] = grad_NQ.t() @ x_NE
                    if grad_up_bias is not None:
                        grad_up_bias[units] = grad_NQ.sum(0)
                    del grad_NQ
                del hidden_NQ
        return grad_x, grad_up, grad_up_bias, grad_down, grad_NE.sum(0) if wants_down_bias else None, None, None


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


def _through(act: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `act`'s input from that of its output."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (grad_x,) = torch.autograd.grad(act(x), x, grad)
    return grad_x


def _unit_parts(units: int, tokens: int, size: int) -> Iterator[slice]:
    """Parts of the hidden units whose size for all tokens is about that of all units for `size` tokens."""
    start = 0
    for width in _even_parts(units, max(1, units * min(size, tokens) // max(1, tokens)), UNITS):
        yield slice(start, start + width)
        start += width


@contextmanager
def _casts_apart() -> Iterator[None]:
    """Make autocast cast a weight for each part: gradients of one shared cast would be summed in its dtype, not in float32."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
