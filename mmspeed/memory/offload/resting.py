"""Rest tensors in the host's memory while nothing computes with them: models that take turns need room for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mmspeed.device import host_room
from mmspeed.torch_internals import storage_address

from .storage_view import flat_bytes


class HostRest:
    """Tensors of a device that lie in the host's memory between `rest` and `wake`; meanwhile their storages are empty.

    The tensors stay the same objects, so engines, optimizers and views of them need not know. Pinned copies are kept for the next rest.
    `tensors`: those that rest, asked for at each rest, since optimizers make their states late; those of other devices stay.
    """

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._device, self._tensors = device, tensors
        self._copies: dict[int, Tensor] = {}  # by the address of the storage object
        self._resting: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that rest now."""
        return sum(copy.numel() for _, copy in self._resting)

    @torch.no_grad()
    def rest(self) -> None:
        """Copy all tensors to the host and free their memory on the device; nothing where they rest already."""
        if self._resting:
            return
        storages = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                storages[storage_address(storage)] = storage
        self._copies = {address: copy for address, copy in self._copies.items() if address in storages}
        for address, storage in storages.items():
            values_Z = flat_bytes(storage, 0, storage.nbytes())
            copy = self._copies.get(address)
            if copy is None or copy.numel() != values_Z.numel():
                copy = self._copies[address] = host_room(values_Z)
            copy.copy_(values_Z)  # waits: the memory is freed next
            storage.resize_(0)
            self._resting.append((storage, copy))

    @torch.no_grad()
    def wake(self) -> None:
        """Bring the tensors back; nothing where they do not rest."""
        for storage, copy in self._resting:
            storage.resize_(copy.numel())
            flat_bytes(storage, 0, copy.numel()).copy_(copy, non_blocking=copy.is_pinned())
        self._resting = []
