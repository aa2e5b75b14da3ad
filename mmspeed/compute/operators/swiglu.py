"""The gated activation of a SwiGLU (Shazeer 2020): silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import npu_operators

from .base import Implementation, Operator


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; backward keeps three tensors."""
    return F.silu(gate) * up


class _Lean(torch.autograd.Function):
    """silu(gate) * up; backward keeps the two inputs, and computes silu again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (gate, up) = grads, ctx.saved_tensors
        if gate.dtype in (torch.bfloat16, torch.float16):  # in fewer launches
            return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
        dtype = torch.promote_types(gate.dtype, torch.float32)
        wide = gate.to(dtype)
        sigmoid = torch.sigmoid(wide)
        slope = (
            (1 - sigmoid).mul_(wide).add_(1).mul_(sigmoid)
        )  # in place: on the host new memory costs as much as the products
        return (grad * up).mul_(slope).to(gate.dtype), (grad * sigmoid.mul_(wide)).to(up.dtype)


def lean_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of which backward keeps the two inputs alone."""
    return _Lean.apply(gate, up)  # type: ignore[no-any-return]


def _lean_refuses(gate: Tensor, up: Tensor) -> str:
    if torch.compiler.is_compiling():
        return "a graph keeps what it needs by itself"
    return "" if torch.is_grad_enabled() else "no gradient is recorded"


swiglu = Operator(
    "swiglu",
    (
        Implementation("fused", npu_operators.swiglu, npu_operators.refuses("npu_swiglu")),
        Implementation("lean", lean_swiglu, _lean_refuses),
        Implementation("eager", eager_swiglu),
    ),
)
