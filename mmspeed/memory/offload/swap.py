"""Swapping: tensors that backward needs lie in the host's memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .swap_group import OffloadPool, PooledOffloadGroup


class OffloadGroup(Protocol):
    """What one span of one forward pass keeps in the host's memory."""

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor out; the result gives it back, on its device. A tensor that is not worth it is kept as it is."""
        ...

    def close(self) -> None:
        """The span's forward is done."""
        ...

    def fetch(self) -> None:
        """Backward has come to the span: begin to copy its tensors back, and those of the span before it."""
        ...

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, all that autograd saves is stored."""
        ...


class Offloader(OffloadPool):
    """Where a model's spans swap to. Tensors of fewer than `from_bytes` stay."""

    def group(self) -> OffloadGroup:
        """A new group, for one run of a span."""
        return PooledOffloadGroup(self)
