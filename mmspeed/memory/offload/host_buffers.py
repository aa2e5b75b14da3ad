"""Pack tensors flat, and hold bytes in the host's memory that visit the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.device import Device

from .copies import CopyEngine, CopyJob, HostBuffer, HostPool

ALIGNMENT = 128  # bytes, for vectorised kernels


@dataclass(frozen=True)
class FlatSlice:
    """The place of a tensor in a flat one: `length` of its elements from `start` on. With a dtype, the flat one holds bytes."""

    start: int
    length: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None = None

    def of(self, flat_Z: Tensor) -> Tensor:
        """The tensor as a view of the flat one."""
        piece_Z = flat_Z[self.start : self.start + self.length]
        return (piece_Z if self.dtype is None else piece_Z.view(self.dtype)).as_strided(self.shape, self.stride)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own order of dims, without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def lay_out(tensors: Iterable[Tensor]) -> tuple[list[FlatSlice], int]:
    """Places of tensors, one after another, in a flat tensor of elements, and its number of elements."""
    places, total = [], 0
    for tensor in tensors:
        places.append(FlatSlice(total, tensor.numel(), tuple(tensor.shape), _dense_stride(tensor)))
        total = _up(total + tensor.numel(), ALIGNMENT // 4)
    return places, places[-1].start + places[-1].length if places else 0


def lay_out_bytes(tensors: Iterable[Tensor]) -> tuple[list[FlatSlice], int]:
    """Places of tensors of several dtypes, one after another, in a flat tensor of bytes, and its number of bytes."""
    places, end = [], 0
    for tensor in tensors:
        start = _up(end, ALIGNMENT)
        end = start + tensor.numel() * tensor.element_size()
        places.append(FlatSlice(start, end - start, tuple(tensor.shape), _dense_stride(tensor), tensor.dtype))
    return places, end


class OffloadedBuffer:
    """Bytes that lie in the host's memory, and visit the device as one flat uint8 tensor: `fetch`, `here`, then `send` or `forget`.

    Many buffers share a pool, which allocates page-locked memory in large pieces.
    """

    def __init__(self, device: Device, copies: CopyEngine, pool: HostPool | None = None) -> None:
        self.device, self.copies, self.pool = device, copies, pool or HostPool(device)
        self.buffer: HostBuffer | None = None
        self._flat_Z: Tensor | None = None
        self._coming: CopyJob | None = None
        self._going: tuple[CopyJob, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now, including those on their way."""
        going = 0 if self._going is None else self._going[1].numel()
        return going + (0 if self._flat_Z is None else self._flat_Z.numel())

    def resize(self, nbytes: int) -> None:
        """Change the number of bytes; their values are then unknown. Raises UserError when the host's memory is full."""
        if nbytes == self.nbytes:
            return
        self._finish()
        if self.buffer is not None:
            self.pool.give(self.buffer)
            self.buffer = None
        if nbytes:
            self.buffer = self.pool.take(nbytes)

    def fetch(self) -> None:
        """Begin to copy to the device, unless it is there."""
        if self._flat_Z is None and self.buffer is not None:
            self.settle()
            flat_Z = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device.torch_device)
            self._coming = self.copies.back(self.buffer, flat_Z)
            self._flat_Z = flat_Z

    def here(self) -> Tensor | None:
        """The bytes on the device, once they have arrived; None where there are none. Call `fetch` before."""
        job, self._coming = self._coming, None
        if job is not None:
            try:
                job.wait()
            except BaseException:
                self._flat_Z = None
                raise
        return self._flat_Z

    def send(self, flat_Z: Tensor) -> None:
        """Begin to copy bytes from the device to the host; `here` no longer returns them."""
        self.here()
        self._flat_Z = None
        if self.buffer is not None:
            self._going = (self.copies.out(flat_Z, self.buffer), flat_Z)

    def forget(self) -> None:
        """Free the bytes on the device, which were not changed."""
        self.here()
        self._flat_Z = None

    def settle(self) -> None:
        """Free the device's memory once the bytes sent have left. The device waits for them, this thread on a CPU only."""
        if self._going is not None:
            self._going[0].wait()
            self._going = None

    def _finish(self) -> None:
        """Wait until no copy is under way, with this thread too."""
        self.forget()
        self.settle()
        self.device.synchronize()

    def on_host(self) -> Tensor:
        """The host's bytes as a flat uint8 tensor on the CPU, once no copy is under way."""
        self._finish()
        return torch.empty(0, dtype=torch.uint8) if self.buffer is None else torch.from_numpy(self.buffer.array)
