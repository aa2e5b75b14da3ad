"""Products of groups of rows with a matrix each, such as the tokens of experts.

Legend: R rows, G groups, I width of the input, O width of the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike
from mmspeed.graphs import outside_graphs

from .base import Implementation, Operator

ALIGNMENT = 16  # bytes of which torch's operator needs a multiple in a row


@outside_graphs
def looped_product(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """`x W_g^T` of each row with the matrix of its group, `out_RO`: a product for each group that has rows.

    ends_G: the end of each group's rows, which follow one another; the last is R. A group without rows gets a gradient of 0.
    Raises ValueError for rows behind the last end, which belong to no group.
    """
    x_RI, weight_GOI = autocast_alike(x_RI, weight_GOI)
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
    """Passes a tensor on, and its gradient in one piece: torch's grouped product takes no expanded ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def grouped_mm(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """The same by `F.grouped_mm`, in one call. Rows behind the last end would be uninitialised memory: there are none."""
    x_RI, weight_GOI = autocast_alike(x_RI, weight_GOI)
    out: Tensor = _ContiguousGradient.apply(F.grouped_mm(x_RI, weight_GOI.mT, offs=ends_G.to(torch.int32)))  # type: ignore[no-untyped-call]
    return out


def _grouped_refuses(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> str:
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    x_RI, weight_GOI = autocast_alike(x_RI[:0], weight_GOI[:0])
    dtypes = {"cpu": (torch.float32, torch.bfloat16, torch.float16)}.get(x_RI.device.type, (torch.bfloat16,))
    if torch.compiler.is_compiling():  # the operator's shapes are known to graphs for one number type alone
        dtypes = (torch.bfloat16,)
    if x_RI.dtype not in dtypes or weight_GOI.dtype != x_RI.dtype:
        return f"grouped_mm takes no {x_RI.dtype} x {weight_GOI.dtype} on {x_RI.device.type}"
    for width in weight_GOI.shape[1:]:
        if width * x_RI.dtype.itemsize % ALIGNMENT:
            return f"rows of {width} x {x_RI.dtype.itemsize} bytes are no multiple of {ALIGNMENT} bytes"
    return "" if x_RI.is_contiguous() and weight_GOI.is_contiguous() else "an input is not contiguous"


grouped_product = Operator(
    "grouped_product",
    (Implementation("grouped_mm", grouped_mm, _grouped_refuses), Implementation("loop", looped_product)),
)
