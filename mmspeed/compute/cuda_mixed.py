"""An operation whose result has another number type than its argument: in one pass on CUDA, in two on devices without such kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def exp_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(x) in a number type; may overwrite `x`."""
    if x.device.type == "cuda" and x.dtype != dtype:
        return torch.exp(x, out=torch.empty(x.shape, dtype=dtype, device=x.device))
    return x.exp_().to(dtype)
