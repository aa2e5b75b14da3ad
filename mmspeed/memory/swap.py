"""Swapping: tensors that backward needs lie in the host's memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mmspeed.device import Device

from .host import Copies, HostPool, copies_for


class Group(Protocol):
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


class Swap:
    """Where a model's spans swap to. Tensors of fewer than `from_bytes` stay."""

    def __init__(self, device: Device, from_bytes: int = 1 << 20, copies: Copies | None = None) -> None:
        self.device, self.from_bytes = device, from_bytes
        self.copies = copies or copies_for(device)
        self.pool = HostPool(device)
        self.moved_out = self.moved_back = 0  # bytes

    def group(self) -> Group:
        """A new group, for one run of a span."""
        raise NotImplementedError
