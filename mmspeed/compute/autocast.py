"""Autocast for functions that torch's autocast does not handle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_alike(*xs: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, which does not handle our own functions and exchanges."""
    kind = xs[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or xs[0].dtype == torch.float64:
        return xs
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in xs)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Compute in the dtypes of the tensors inside, on the device of `x`; the meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
