"""Copy between a device and the host's memory, beside the computation.

On an accelerator the host's memory is page-locked, and each direction has a stream of its own. On a CPU both are the same memory, the copy
is made at once, and the host's part lies outside of torch's allocator, so that what torch counts is the device's part.
"""

from __future__ import annotations

import ctypes
from bisect import insort
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmspeed.device import Device, is_out_of_memory
from mmspeed.errors import UserError

ALIGNMENT = 512  # bytes, as of a device's allocator
SLAB_BYTES = 256 << 20  # the pool grows by at most this at a time, except for a larger buffer


class HostBuffer:
    """Bytes in the host's memory: its own, or those of `slab` from byte `start` on."""

    def __init__(self, nbytes: int, pinned: bool, slab: HostSlab | None = None, start: int = 0) -> None:
        self.nbytes, self.slab, self.start = nbytes, slab, start
        self.tensor: Tensor | None = None
        if slab is not None:
            whole = slab.memory
            self.tensor = None if whole.tensor is None else whole.tensor[start : start + nbytes]
            self.array: np.ndarray = whole.array[start : start + nbytes]
        elif pinned:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.array = self.tensor.numpy()
        else:
            self.array = np.empty(nbytes, np.uint8)


class HostSlab:
    """Memory that buffers are cut from. `gaps`: the free ranges, (start, end) in order, not touching one another."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.memory = HostBuffer(nbytes, pinned)
        self.gaps = [(0, nbytes)]

    def room(self, nbytes: int) -> int | None:
        """The size of the smallest gap of at least so many bytes; None where there is none."""
        return min((end - start for start, end in self.gaps if end - start >= nbytes), default=None)

    def take(self, nbytes: int) -> int:
        """Take so many bytes from the gap that `room` chooses, and return their start."""
        room = self.room(nbytes)
        place = next(i for i, (start, end) in enumerate(self.gaps) if end - start == room)
        start, end = self.gaps.pop(place)
        if start + nbytes < end:
            self.gaps.insert(place, (start + nbytes, end))
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Make bytes a gap again. Raises ValueError where they are one already."""
        insort(self.gaps, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for first, last in self.gaps:
            if joined and first < joined[-1][1]:
                raise ValueError("a buffer of a host pool was given back twice")
            if joined and first == joined[-1][1]:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self.gaps = joined

    @property
    def idle(self) -> bool:
        return self.gaps == [(0, self.memory.nbytes)]


class CopyJob(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Make work that is queued on the device from now on wait for the copy. This thread waits on a CPU only."""
        ...

    def done(self) -> bool:
        """True once the copy is done."""
        ...


class CopyEngine(Protocol):
    """An engine that copies. Both arguments have the same number of bytes; device tensors are flat and uint8.

    A copy begins when what was queued on the device before is done. Neither side may be changed or freed before the job is done.
    """

    def out(self, source_Z: Tensor, target: HostBuffer) -> CopyJob: ...

    def back(self, source: HostBuffer, target_Z: Tensor) -> CopyJob: ...


class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class CpuCopyEngine:
    """An engine that copies at once, unseen by torch. Raises ValueError for a buffer that is too small."""

    def out(self, source_Z: Tensor, target: HostBuffer) -> CopyJob:
        _move(source_Z, target, out=True)
        return _Done()

    def back(self, source: HostBuffer, target_Z: Tensor) -> CopyJob:
        _move(target_Z, source, out=False)
        return _Done()


def _move(tensor_Z: Tensor, buffer: HostBuffer, out: bool) -> None:
    nbytes = tensor_Z.numel()
    if nbytes > buffer.nbytes or not tensor_Z.is_contiguous() or tensor_Z.dtype != torch.uint8:
        raise ValueError(f"{nbytes} {tensor_Z.dtype} do not fit into {buffer.nbytes} bytes")
    # by address: torch resizes no storage that numpy has ever seen
    tensor_address, buffer_address = tensor_Z.data_ptr(), buffer.array.ctypes.data
    ctypes.memmove(buffer_address if out else tensor_address, tensor_address if out else buffer_address, nbytes)


class _Event:
    def __init__(self, event: torch.Event, device: Device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device.torch_device).wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())


class StreamCopyEngine:
    """An engine that copies on two streams beside the one that computes, one for each direction."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._out, self._back = device.side_stream(), device.side_stream()

    def _begin(self, stream: torch.Stream, target: Tensor, source: Tensor) -> CopyJob:
        stream.wait_event(torch.accelerator.current_stream(self.device.torch_device).record_event())
        with stream:
            target.copy_(source, non_blocking=True)
        return _Event(stream.record_event(), self.device)

    def out(self, source_Z: Tensor, target: HostBuffer) -> CopyJob:
        assert target.tensor is not None
        return self._begin(self._out, target.tensor[: source_Z.numel()], source_Z)

    def back(self, source: HostBuffer, target_Z: Tensor) -> CopyJob:
        assert source.tensor is not None
        return self._begin(self._back, target_Z, source.tensor[: target_Z.numel()])


def copies_for(device: Device) -> CopyEngine:
    """The copy engine of a device."""
    return CpuCopyEngine() if device.kind == "cpu" else StreamCopyEngine(device)


class HostPool:
    """A pool of buffers in the host's memory, cut from slabs that stay.

    Page-locked memory is slow to allocate, and torch rounds each piece up to a power of two: so it is allocated in such pieces, and buffers
    of any size are cut from them. `bytes` are those of all slabs, `used` those of all buffers now, and `peak` the maximum of `used`.

    advice: the way out that the error names when the host has no more memory.
    """

    def __init__(
        self, device: Device, advice: str = "offload less in memory.activation_policy, or raise memory.offload_from"
    ) -> None:
        self._pinned = device.kind != "cpu"
        self._slabs: list[HostSlab] = []
        self._advice = advice
        self.bytes = self.used = self.peak = 0

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of so many bytes. Raises UserError when the host's memory is full."""
        size = _rounded(nbytes)
        rooms = [(room, number) for number, slab in enumerate(self._slabs) if (room := slab.room(size)) is not None]
        slab = self._slabs[min(rooms)[1]] if rooms else self._grow(size)
        buffer = HostBuffer(nbytes, self._pinned, slab, slab.take(size))
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Give back a buffer that is no longer used, with no copy under way. Raises ValueError for one that was given back before."""
        assert buffer.slab is not None
        buffer.slab.give(buffer.start, _rounded(buffer.nbytes))
        self.used -= buffer.nbytes

    def trim(self) -> None:
        """Give unused slabs back to the host."""
        self._slabs = [slab for slab in self._slabs if not slab.idle]
        self.bytes = sum(slab.memory.nbytes for slab in self._slabs)

    def _grow(self, nbytes: int) -> HostSlab:
        wanted = _power_of_two(max(nbytes, min(self.bytes // 4, SLAB_BYTES)))
        slab = self._new(wanted)
        if slab is None:
            self.trim()
            slab = self._new(nbytes)
        if slab is None:
            raise UserError(
                f"the host's memory is full: {nbytes / 2**30:.2f} GiB more are needed beside {self.used / 2**30:.2f} GiB in use; "
                + self._advice
            )
        self._slabs.append(slab)
        self.bytes += slab.memory.nbytes
        return slab

    def _new(self, nbytes: int) -> HostSlab | None:
        # most hosts overcommit memory, and end the process that uses too much
        if nbytes > Device("cpu", 0).free_memory_bytes():
            return None
        try:
            return HostSlab(nbytes, self._pinned)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
