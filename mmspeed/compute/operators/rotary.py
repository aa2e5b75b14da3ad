"""Rotations of queries and keys whose tokens lie in the second dim, for one-dimensional positions (RoFormer, Su et al. 2021).

Legend: B batch, N tokens, A heads, D head width, H half of D (pairs), 2 cosine and sine.
"""

from __future__ import annotations

from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.rope import apply_rope, turned, turned_refuses

from .base import Implementation, Operator


def eager_rotate(x_BNAD: Tensor, turn_2BNH: Tensor) -> Tensor:
    """`x_BNAD` with channel i rotated against channel i + D/2; computed in `rope_dtype`, returned in its dtype."""
    return apply_rope(x_BNAD, *turn_2BNH[:, :, :, None].unbind(0))


def lean_rotate(x_BNAD: Tensor, turn_2BNH: Tensor) -> Tensor:
    """The same rotation in fewer launches, whose backward keeps no activation; tables get no gradient."""
    return turned(x_BNAD, turn_2BNH[:, :, :, None])


def _lean_refuses(x_BNAD: Tensor, turn_2BNH: Tensor) -> str:
    return turned_refuses(turn_2BNH)


rotary = Operator(
    "rotary",
    (
        Implementation("fused", npu_operators.rotate, npu_operators.rotate_refuses),
        Implementation("lean", lean_rotate, _lean_refuses),
        Implementation("eager", eager_rotate),
    ),
)
