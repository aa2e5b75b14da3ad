"""What the machine at hand does with cut matrix products, asked before a test expects equal bits of them; and a made-up machine.

The bits of a sum depend on its order, and a library chooses that by the shape of the product: so products of other shapes have the same
bits on some machines only. Even numbers that are computed each apart may be rounded otherwise at the end of a tensor, where a vector
register is not full. What holds everywhere is that the same shapes give the same bits.
Legend: N tokens, E width, M hidden units, O width of the result, P Q numbers of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.memory.chunked import ROWS, UNITS, _even_parts
from mmspeed.models.sora.layers import Mlp
from tests.support.mlps import PlainMlp, gelu

MM, ADDMM, SUM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sum.dim_IntList


def parts_have_the_bits_of_the_whole(mlp: PlainMlp | Mlp, x_NE: Tensor, grad_NO: Tensor, size: int) -> bool:
    """Whether this machine computes an MLP's products with the same bits over parts of rows, and over parts of hidden units, as at once.

    Products alone, with the tensors of the test: neither autograd nor `chunked_mlp` has a part in it.
    """
    x_NE, grad_NO = x_NE.detach().flatten(0, -2), grad_NO.detach().flatten(0, -2)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_NE.dtype
    weights = [
        None if w is None else w.detach().to(dtype)
        for w in (mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias)
    ]
    up_ME, up_M, down_OM, down_O = weights
    assert up_ME is not None and down_OM is not None
    x_NE, grad_NO = x_NE.to(dtype), grad_NO.to(dtype)
    tokens, units = len(x_NE), len(up_ME)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        hidden_NM = F.linear(x_NE, up_ME, up_M)
        active_NM, inner_NM = gelu(hidden_NM), grad_NO @ down_OM
        through_NM = _gradient(hidden_NM, inner_NM)
        down_grad_OM, up_grad_ME, up_grad_M = grad_NO.t() @ active_NM, through_NM.t() @ x_NE, through_NM.sum(0)
        whole = (hidden_NM, active_NM, F.linear(active_NM, down_OM, down_O), inner_NM, through_NM, through_NM @ up_ME)
        same, start = True, 0
        for part in _even_parts(tokens, size, ROWS):
            rows = slice(start, start + part)
            h, g = F.linear(x_NE[rows], up_ME, up_M), grad_NO[rows] @ down_OM
            t = _gradient(h, g)
            mine = (h, gelu(h), F.linear(gelu(h), down_OM, down_O), g, t, t @ up_ME)
            same &= all(torch.equal(one, other[rows]) for one, other in zip(mine, whole, strict=True))
            start += part
        start = 0
        for part in _even_parts(units, max(1, units * min(size, tokens) // max(1, tokens)), UNITS):
            some = slice(start, start + part)
            h, g = F.linear(x_NE, up_ME[some], None if up_M is None else up_M[some]), grad_NO @ down_OM[:, some]
            t = _gradient(h, g)
            same &= torch.equal(h, hidden_NM[:, some]) and torch.equal(g, inner_NM[:, some])
            same &= torch.equal(grad_NO.t() @ gelu(h), down_grad_OM[:, some]) and torch.equal(t, through_NM[:, some])
            same &= torch.equal(t.t() @ x_NE, up_grad_ME[some]) and torch.equal(t.sum(0), up_grad_M[some])
            start += part
    return bool(same)


def parts_of_numbers_have_the_bits_of_the_whole(x: Tensor, part: slice) -> bool:
    """Whether this machine computes what treats each number apart with the same bits over a part of the first dim as at once."""
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda y: torch.sin(y + 0.7),
        lambda y: 0.3 * y + 0.7 * y.cos(),
        lambda y: (y - 0.3 * y.sin()) / 0.7,
    )
    return all(torch.equal(function(x[part]), function(x)[part]) for function in functions)


def _gradient(hidden_PQ: Tensor, grad_PQ: Tensor) -> Tensor:
    """Of gelu's input, from that of its result."""
    return torch.ops.aten.gelu_backward(grad_PQ, hidden_PQ, approximate="tanh")


class Machine(TorchDispatchMode):
    """Inside, each product sums its terms one after another, so that its numbers do not depend on its shape. Slow; float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is MM:
            return self._product(*args)
        if func is ADDMM:
            return self._product(args[1], args[2]) + args[0]
        if func is SUM and args[1] == [0]:
            total = torch.zeros_like(args[0][:1])
            for row in args[0].split(1):
                total = total + row
            return total if len(args) > 2 and args[2] else total[0]
        return func(*args, **(kwargs or {}))

    def _product(self, one: Tensor, two: Tensor) -> Tensor:
        total = one.new_zeros(one.shape[0], two.shape[1])
        for term in range(one.shape[1]):
            total = total + one[:, term, None] * two[None, term]
        return total
