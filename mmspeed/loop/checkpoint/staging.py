"""Copies of a state in the host's memory: a thread writes from them while training continues.

torch's stagers make new buffers for each save, or pin them for CUDA alone. Here one set serves all saves of a run: copying into
memory that is there costs no page faults, and pinned memory is slow to get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.device import copy_mark, host_room
from mmspeed.parallel.tensor import local

from .state import laid_out


@dataclass(frozen=True)
class StagedState:
    """A state in the buffers of a `Staging`, by name, in the layout that it has on the devices."""

    tensors: dict[str, Tensor]
    marks: tuple[torch.Event, ...]

    def wait(self) -> None:
        """Wait until the devices have written the buffers. For the writing thread: the training thread need not."""
        for mark in self.marks:
            mark.synchronize()


@dataclass(frozen=True)
class SaveStall:
    """The seconds that a save kept the training thread: for the write before it, and for the copy of the state."""

    waited: float
    copied: float


class Staging:
    """The buffers that each save of a run copies its state into: pinned for tensors on an accelerator, plain for those of the host.

    The state is in them until the next save. One save uses them at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, values: Tensor) -> Tensor:
        """A copy of this process's part of a tensor in its buffer, complete on return; for tensors that exist for a moment only."""
        buffer = self._room(name, values)
        return buffer.copy_(values)

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedState:
        """Copy a state aside. Tensors that `copy` returned are taken as they are; buffers of other names are freed.

        Copies from an accelerator are queued behind the work that makes its values, before the work that changes them: this thread goes on.
        """
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in tensors}
        staged, devices = {}, set()
        for name, tensor in tensors.items():
            values = local(tensor.detach())
            buffer = self._room(name, values)
            if not _same_memory(values, buffer):
                queued = buffer.is_pinned()
                buffer.copy_(values, non_blocking=queued)
                devices |= {values.device} if queued else set()
            staged[name] = laid_out(tensor, buffer)
        return StagedState(staged, _marks(devices))

    def _room(self, name: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = self._buffers[name] = host_room(values)
        return buffer


def _same_memory(values: Tensor, buffer: Tensor) -> bool:
    return values.device == buffer.device and values.numel() > 0 and values.data_ptr() == buffer.data_ptr()


def _marks(devices: Iterable[torch.device]) -> tuple[torch.Event, ...]:
    return tuple(copy_mark(device) for device in devices)
