"""Copies between a device and the host's memory, beside the computation.

On an accelerator the host's memory is page-locked, and each direction has a stream of its own. On a CPU both are the same memory, the copy
is made at once, and the host's part lies outside of torch's allocator, so that what torch counts is the device's part.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmspeed.device import Device


class HostBuffer:
    """Bytes in the host's memory."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pinned else None
        self.array: np.ndarray = np.empty(nbytes, np.uint8) if self.tensor is None else self.tensor.numpy()


class Job(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Work that is queued on the device from now on finds it done. This thread waits on a CPU only."""
        ...

    def done(self) -> bool:
        """Whether it is done."""
        ...


class Copies(Protocol):
    """Who copies. Both arguments have the same number of bytes; device tensors are flat and uint8.

    A copy begins when what was queued on the device before is done. Neither side may be changed or freed before the job is done.
    """

    def out(self, source_Z: Tensor, target: HostBuffer) -> Job: ...

    def back(self, source: HostBuffer, target_Z: Tensor) -> Job: ...


class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class CpuCopies:
    """Copies made at once, unseen by torch."""

    def out(self, source_Z: Tensor, target: HostBuffer) -> Job:
        np.copyto(target.array[: source_Z.numel()], source_Z.numpy())
        return _Done()

    def back(self, source: HostBuffer, target_Z: Tensor) -> Job:
        np.copyto(target_Z.numpy(), source.array[: target_Z.numel()])
        return _Done()


class _Event:
    def __init__(self, event: torch.Event, device: Device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device.torch_device).wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())


class StreamCopies:
    """Copies on two streams beside the one that computes, one for each direction."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._out, self._back = device.side_stream(), device.side_stream()

    def _begin(self, stream: torch.Stream, target: Tensor, source: Tensor) -> Job:
        stream.wait_event(torch.accelerator.current_stream(self.device.torch_device).record_event())
        with stream:
            target.copy_(source, non_blocking=True)
        return _Event(stream.record_event(), self.device)

    def out(self, source_Z: Tensor, target: HostBuffer) -> Job:
        assert target.tensor is not None
        return self._begin(self._out, target.tensor[: source_Z.numel()], source_Z)

    def back(self, source: HostBuffer, target_Z: Tensor) -> Job:
        assert source.tensor is not None
        return self._begin(self._back, target_Z, source.tensor[: target_Z.numel()])


def copies_for(device: Device) -> Copies:
    """Who copies for a device."""
    return CpuCopies() if device.kind == "cpu" else StreamCopies(device)


class HostPool:
    """Buffers in the host's memory, used again by their size. `bytes` of all of them, and of those in use (`used`, `peak`)."""

    def __init__(self, device: Device) -> None:
        self._pinned = device.kind != "cpu"
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self.bytes = self.used = self.peak = 0

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of so many bytes."""
        free = self._free[nbytes]
        if free:
            buffer = free.pop()
        else:
            buffer = HostBuffer(nbytes, self._pinned)
            self.bytes += nbytes
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """A buffer is no longer used; no copy from or to it is under way."""
        self.used -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)
