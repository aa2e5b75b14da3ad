"""Rotations of queries and keys whose tokens lie in the second dim, for one-dimensional positions (RoFormer, Su et al. 2021).

Legend: B batch, N tokens, A heads, D head width, H half of D (pairs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.rope import rope_dtype

from .base import Implementation, Operator


def eager_rotate(x_BNAD: Tensor, cos_BNH: Tensor, sin_BNH: Tensor) -> Tensor:
    """`x_BNAD` with channel i rotated against channel i + D/2; computed in `rope_dtype`, returned in its dtype."""
    first, second = x_BNAD.to(rope_dtype(x_BNAD.dtype)).chunk(2, dim=-1)
    cos, sin = cos_BNH[:, :, None], sin_BNH[:, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNAD.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation, whose backward is the rotation back and keeps no activation."""

    @staticmethod
    def forward(ctx: Any, x_BNAD: Tensor, cos_BNH: Tensor, sin_BNH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BNH, sin_BNH)
        return eager_rotate(x_BNAD, cos_BNH, sin_BNH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_BNH, sin_BNH = ctx.saved_tensors
        return eager_rotate(grads[0], cos_BNH, -sin_BNH), None, None


def lean_rotate(x_BNAD: Tensor, cos_BNH: Tensor, sin_BNH: Tensor) -> Tensor:
    """The same rotation; tables of cosines and sines get no gradient."""
    return _Rotate.apply(x_BNAD, cos_BNH, sin_BNH)  # type: ignore[no-any-return]


def _lean_refuses(x_BNAD: Tensor, cos_BNH: Tensor, sin_BNH: Tensor) -> str:
    if torch.compiler.is_compiling():
        return "a graph keeps what it needs by itself"
    return "the tables need a gradient" if cos_BNH.requires_grad or sin_BNH.requires_grad else ""


rotary = Operator(
    "rotary",
    (
        Implementation("fused", npu_operators.rotate, npu_operators.rotate_refuses),
        Implementation("lean", lean_rotate, _lean_refuses),
        Implementation("eager", eager_rotate),
    ),
)
