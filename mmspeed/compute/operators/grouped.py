"""Grouped matrix products: each contiguous group of rows is multiplied by a matrix of its own, as an expert's tokens by its weight.

Legend: R rows, G groups, I width of the input, O width of the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.autocast import autocast_alike
from mmspeed.graphs import outside_graphs
from mmspeed.torch_internals import is_fake

from .base import Implementation, Operator

ALIGNMENT = 16  # torch's operator takes rows whose size in bytes is a multiple of this


@outside_graphs
def looped_product(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Multiply each row by its group's matrix, `out_RO` = `x W_g^T`, in a loop over the groups that have rows.

    ends_G: the end (exclusive) of each group's rows; groups are contiguous and in order. The matrix of a group without rows gets a zero
    gradient.
    Raises ValueError where the last end is not R: rows behind it would belong to no group.
    """
    x_RI, weight_GOI = autocast_alike(x_RI, weight_GOI)
    if is_fake(x_RI):  # no value tells the groups: as much work, and a result of the same shape
        return x_RI @ weight_GOI[0].mT
    ends = ends_G.tolist()
    if (ends[-1] if ends else 0) != len(x_RI):
        raise ValueError(f"{len(x_RI)} rows, and the last group ends at {ends[-1] if ends else 0}")
    starts = [0, *ends[:-1]]
    parts = [
        x_RI[start:end] @ weight_GOI[group].mT
        for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    return torch.cat(parts) if parts else x_RI @ weight_GOI[0].mT


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose backward makes the gradient contiguous: torch's grouped product takes no expanded gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def grouped_mm(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """`looped_product` in one call of `F.grouped_mm`. The last end must be R (unchecked): rows behind it would be uninitialised."""
    x_RI, weight_GOI = autocast_alike(x_RI, weight_GOI)
    out: Tensor = _ContiguousGradient.apply(F.grouped_mm(x_RI, weight_GOI.mT, offs=ends_G.to(torch.int32)))  # type: ignore[no-untyped-call]
    return out


def _grouped_refuses(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> str:
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    x_RI, weight_GOI = autocast_alike(x_RI[:0], weight_GOI[:0])
    dtypes = {"cpu": (torch.float32, torch.bfloat16, torch.float16)}.get(x_RI.device.type, (torch.bfloat16,))
    if torch.compiler.is_compiling() or is_fake(x_RI):  # torch knows the output's shape for this dtype alone
        dtypes = (torch.bfloat16,)
    if x_RI.dtype not in dtypes or weight_GOI.dtype != x_RI.dtype:
        return f"grouped_mm takes no {x_RI.dtype} x {weight_GOI.dtype} on {x_RI.device.type}"
    for width in weight_GOI.shape[1:]:
        if width * x_RI.dtype.itemsize % ALIGNMENT:
            return f"rows of {width} x {x_RI.dtype.itemsize} bytes are no multiple of {ALIGNMENT} bytes"
    dense = weight_GOI.is_contiguous() or weight_GOI.mT.is_contiguous()
    return "" if x_RI.is_contiguous() and dense else "an input is not contiguous"


@outside_graphs
def looped_outer(left_RO: Tensor, right_RI: Tensor, ends_G: Tensor) -> Tensor:
    """The products of the columns of two matrices over each group's rows, `out_GOI` = `left_g^T right_g`: gradients of `looped_product`."""
    if is_fake(right_RI):  # as in `looped_product`
        return (left_RO.mT @ right_RI).repeat(len(ends_G), 1, 1)
    ends = ends_G.tolist()
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return torch.stack([left_RO[start:end].mT @ right_RI[start:end] for start, end in pairs])


def outer_mm(left_RO: Tensor, right_RI: Tensor, ends_G: Tensor) -> Tensor:
    """`looped_outer` in one call of `F.grouped_mm`."""
    return F.grouped_mm(left_RO.mT, right_RI, offs=ends_G.to(torch.int32))


def _outer_refuses(left_RO: Tensor, right_RI: Tensor, ends_G: Tensor) -> str:
    like_GOI = left_RO.new_empty(0, left_RO.shape[1], right_RI.shape[1])
    return _grouped_refuses(right_RI, like_GOI, ends_G)


grouped_outer = Operator(
    "grouped_outer",
    (
        Implementation("fused", npu_operators.grouped_outer, npu_operators.outer_refuses),
        Implementation("grouped_mm", outer_mm, _outer_refuses),
        Implementation("loop", looped_outer),
    ),
)

grouped_product = Operator(
    "grouped_product",
    (
        Implementation("fused", npu_operators.grouped_product, npu_operators.grouped_refuses),
        Implementation("grouped_mm", grouped_mm, _grouped_refuses),
        Implementation("loop", looped_product),
    ),
)
