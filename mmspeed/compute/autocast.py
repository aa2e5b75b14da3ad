"""Autocast for functions of our own, which it does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_alike(*xs: Tensor) -> tuple[Tensor, ...]:
    """In the dtype that autocast would compute in: functions of our own and exchanges are unknown to it."""
    kind = xs[0].device.type
    if not torch.is_autocast_enabled(kind) or xs[0].dtype == torch.float64:
        return xs
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in xs)
