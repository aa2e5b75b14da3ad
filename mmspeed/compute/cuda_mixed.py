"""Operations whose result has another number type than their arguments: in one pass on CUDA, in two where a device has no such kernels.

Legend: M, N, K any sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exp_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(x) in a number type; may overwrite `x`."""
    if x.device.type == "cuda" and x.dtype != dtype:
        return torch.exp(x, out=torch.empty(x.shape, dtype=dtype, device=x.device))
    return x.exp_().to(dtype)


def add_product_(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add a product of matrices to a sum of a wider number type, which its kernel sums in."""
    if sum_MN.dtype == a_MK.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    elif sum_MN.device.type == "cuda":
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN += a_MK @ b_KN
