"""Averages in the host's memory, which come to the device bucket by bucket for each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from mmspeed.device import Device
from mmspeed.memory.offload.copies import HostPool, copies_for
from mmspeed.memory.offload.host_buffers import FlatSlice, OffloadedBuffer, lay_out
from mmspeed.torch_internals import lerp_each_


class HostAverages:
    """float32 tensors in the host's memory, in the order of their values."""

    def __init__(self, shapes: Iterable[Tensor], bucket_bytes: int, device: Device) -> None:
        """Allocate tensors of the shapes of `shapes`, in buckets of about `bucket_bytes`, without values.

        Raises UserError when the host's memory is full.
        """
        copies = copies_for(device)
        pool = HostPool(device, "leave the moving average on the device: memory.ema")
        self._parcels: list[tuple[OffloadedBuffer, list[FlatSlice]]] = []
        for some in _bucketed(shapes, bucket_bytes):
            places, size = lay_out(some)
            parcel = OffloadedBuffer(device, copies=copies, pool=pool)
            parcel.resize(4 * size)
            self._parcels.append((parcel, places))

    def tensors(self) -> list[Tensor]:
        """The averages in the host's memory, which they share with this object. No update may run while they are written to."""
        return [place.of(parcel.on_host().view(torch.float32)) for parcel, places in self._parcels for place in places]

    def lerp(self, values: Iterable[Tensor], weight: float) -> None:
        """Move each average towards its value: while one bucket is updated, the next one comes and the last one leaves."""
        coming = iter(values)
        for number, (parcel, places) in enumerate(self._parcels):
            parcel.fetch()
            if number + 1 < len(self._parcels):
                self._parcels[number + 1][0].fetch()
            bytes_Z = parcel.here()
            if bytes_Z is None:  # this process has no part of these tensors
                bytes_Z = torch.empty(0, dtype=torch.uint8, device=parcel.device.torch_device)
            flat_Z = bytes_Z.view(torch.float32)
            for place, value in zip(places, islice(coming, len(places)), strict=True):
                lerp_each_([place.of(flat_Z)], [value], weight)
            parcel.send(bytes_Z)
            if number:
                self._parcels[number - 1][0].settle()
        if self._parcels:
            self._parcels[-1][0].settle()

    def settle(self) -> None:
        """Wait for all copies to the host, so that `tensors` can be read and written there."""
        for parcel, _ in self._parcels:
            parcel.on_host()

    @property
    def nbytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(parcel.nbytes for parcel, _ in self._parcels)


def _bucketed(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, in groups of at most `bucket_bytes` of float32, or of a single larger one."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and 4 * sum(t.numel() for t in [*bucket, tensor]) > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
