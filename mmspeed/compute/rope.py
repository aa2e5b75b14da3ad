"""Rotary position embedding over several axes (RoFormer, Su et al. 2021; split over axes as in video transformers).

The head width is split into one part per axis; within a part, pairs of channels turn by position x frequency. Positions
are integers on purpose: mixed-precision wrappers cast floating-point inputs of a module, and angles must stay float32 (float64 for a
model in float64).

Legend: B batch, A heads, N tokens, D head width, H half of D (pairs), X axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def grid_positions(
    grid: tuple[int, int, int], device: torch.device | str | None = None, offset: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    """Positions (t, h, w) of the tokens of a grid, row by row: int64 `pos_NX` with N = T h w and X = 3.

    `offset` is the global position of the first token, for a process that holds a part of a larger grid.
    """
    axes = [torch.arange(start, start + size, device=device) for size, start in zip(grid, offset, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def axis_pairs(head_width: int, axes: int) -> tuple[int, ...]:
    """Pairs of channels of each axis: as equal as they can be, the later axes (height, width) taking the remainder.

    Raises ValueError when the head width is odd or too narrow for one pair per axis.
    """
    pairs = head_width // 2
    if head_width % 2 or pairs < axes:
        raise ValueError(
            f"head width {head_width} cannot be split over {axes} axes: it must be even and at least {2 * axes}"
        )
    return tuple(pairs // axes + (axis >= axes - pairs % axes) for axis in range(axes))


def rope_dtype(dtype: torch.dtype) -> torch.dtype:
    """The number type in which tensors of `dtype` turn: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def rope_cos_sin(
    pos_NX: Tensor, head_width: int, theta: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """`cos_NH` and `sin_NH` in `dtype` for integer positions; pair i of n of an axis turns theta^(-i/n) per step."""
    parts = []
    for axis, pairs in enumerate(axis_pairs(head_width, pos_NX.shape[-1])):
        steps = torch.arange(pairs, device=pos_NX.device, dtype=dtype) / pairs
        parts.append(pos_NX[:, axis, None].to(dtype) * theta**-steps)
    angle_NH = torch.cat(parts, dim=-1)
    return angle_NH.cos(), angle_NH.sin()


def apply_rope(x_BAND: Tensor, cos_NH: Tensor, sin_NH: Tensor) -> Tensor:
    """`x_BAND` with channel i rotated against channel i + D/2; computed in `rope_dtype`, returned in its dtype."""
    first_BANH, second_BANH = x_BAND.to(rope_dtype(x_BAND.dtype)).chunk(2, dim=-1)
    turned_BAND = torch.cat(
        (first_BANH * cos_NH - second_BANH * sin_NH, second_BANH * cos_NH + first_BANH * sin_NH), dim=-1
    )
    return turned_BAND.to(x_BAND.dtype)


def turned(x_BAND: Tensor, turn_2NH: Tensor) -> Tensor:
    """`apply_rope` by cosines and sines in one tensor, with the same numbers; tables may have dims of `x_BAND` in front, too."""
    if turned_refuses(turn_2NH):
        return apply_rope(x_BAND, *turn_2NH.unbind(0))
    return _Turned.apply(x_BAND, turn_2NH)  # type: ignore[no-any-return]


def turned_refuses(turn_2NH: Tensor) -> str:
    """Why the rotation is not computed in few launches; "" where it is."""
    if torch.compiler.is_compiling():
        return "a graph keeps what it needs by itself"
    return "the tables need a gradient" if turn_2NH.requires_grad else ""


class _Turned(torch.autograd.Function):
    """The rotation in three launches, without a cast; its backward is the rotation back and keeps no activation."""

    @staticmethod
    def forward(ctx: Any, x_BAND: Tensor, turn_2NH: Tensor) -> Tensor:
        ctx.save_for_backward(turn_2NH)
        return _turn(x_BAND, turn_2NH, torch.sub, torch.add)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _turn(grads[0], ctx.saved_tensors[0], torch.add, torch.sub), None


def _turn(x_BAND: Tensor, turn_2NH: Tensor, first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Tensor:
    """first(x1 cos, x2 sin) and second(x2 cos, x1 sin), side by side."""
    aligned = turn_2NH.reshape(2, *[1] * (x_BAND.dim() + 1 - turn_2NH.dim()), *turn_2NH.shape[1:])
    by_cos, by_sin = (x_BAND.unflatten(-1, (2, -1)) * aligned[..., None, :]).unbind(0)
    turned_BAND = x_BAND.new_empty(x_BAND.shape)
    first_BANH, second_BANH = turned_BAND.chunk(2, dim=-1)
    first(by_cos[..., 0, :], by_sin[..., 1, :], out=first_BANH)
    second(by_cos[..., 1, :], by_sin[..., 0, :], out=second_BANH)
    return turned_BAND
