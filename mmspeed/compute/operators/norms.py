"""Root-mean-square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.autocast import without_autocast

from .base import Implementation, Operator


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dim, computed in float32 or better, in the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch's operator, whose backward keeps one number for each row beside its input.

    Autocast on CUDA would cast half types to float32 before it; the operator sums in float32 by itself.
    """
    with without_autocast(x):
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


rms_norm = Operator(
    "rms_norm",
    (
        Implementation("fused", npu_operators.rms_norm, npu_operators.refuses("npu_rms_norm")),
        Implementation("torch", fused_rms_norm),
        Implementation("eager", eager_rms_norm),
    ),
)
