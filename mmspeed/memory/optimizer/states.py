"""Hold the states of a torch optimizer between steps: on the device, or in the host's memory, copied or mapped.

All that is assumed of an optimizer is that `optimizer.state[parameter]` is a dict. Every tensor in it of more than one element moves: at
any depth of dicts and lists, inside tensor subclasses such as quantised states, of any dtype, made at the first step or before. Numbers
stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.device import Device
from mmspeed.memory.offload.copies import CopyEngine, HostPool
from mmspeed.memory.offload.host_buffers import FlatSlice, OffloadedBuffer, lay_out_bytes
from mmspeed.torch_internals import is_traceable_wrapper_subclass

State = dict[str, Any]
States = dict[Any, State]  # as in Optimizer.state: by parameter


def transform(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with each plain tensor in it changed: in dicts, lists, tuples and tensor subclasses."""
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            return change(value)
        names, context = value.__tensor_flatten__()
        inner = {name: transform(getattr(value, name), change) for name in names}
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
    if isinstance(value, dict):
        return {key: transform(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(transform(item, change) for item in value)
    return value


def plain_tensors(value: Any) -> list[Tensor]:
    """The plain tensors in a value: in dicts and lists, and inside tensor subclasses such as shards and quantised states."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    transform(value, note)
    return tensors


class DeviceStates:
    """The states of one bucket's masters, where the optimizer has made them."""

    def __init__(self, masters: list[nn.Parameter], states: States, device: Device) -> None:
        self.masters, self.states, self.device = masters, states, device

    def fetch(self) -> None:
        """Begin to bring the states to the device."""

    def put(self) -> None:
        """Put the states where the optimizer reads them."""

    def collect(self) -> None:
        """Take the states that the optimizer has left, and begin to move them to their tier."""

    def settle(self) -> None:
        """Free the device's memory of states that have left."""

    def forget(self) -> None:
        """Free the device's memory of states that came and were not changed."""

    def _moves(self, tensor: Tensor) -> bool:
        return tensor.numel() > 1 and tensor.device == self.device.torch_device

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change each tensor of the states in place."""
        for master in self.masters:
            if master in self.states:
                state = self.states[master]
                for key, value in state.items():
                    state[key] = transform(value, change)

    def read(self, master: nn.Parameter) -> State:
        """The state of one parameter, its tensors where they are. They are not copies; a step changes or replaces them."""
        return dict(self.states[master]) if master in self.states else {}

    def _storages(self) -> dict[int, tuple[Tensor, int]]:
        """(a tensor, bytes) of each storage."""
        storages: dict[int, tuple[Tensor, int]] = {}

        def look(tensor: Tensor) -> Tensor:
            if tensor.device.type != "meta" and tensor.numel():
                storages[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
            return tensor

        self._each(look)
        return storages

    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(n for tensor, n in self._storages().values() if tensor.device == self.device.torch_device)

    def host_bytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(n for tensor, n in self._storages().values() if tensor.device != self.device.torch_device)


class HostStates(DeviceStates):
    """States in the host's memory, in one buffer. Between steps the optimizer holds tensors on the meta device in their place."""

    def __init__(
        self, masters: list[nn.Parameter], states: States, device: Device, copies: CopyEngine, pool: HostPool
    ) -> None:
        super().__init__(masters, states, device)
        self.parcel = OffloadedBuffer(device, copies, pool)
        self._places: list[FlatSlice] = []
        self._place_of: dict[int, FlatSlice] = {}  # by the identity of the tensor in its place
        self._standing: list[Tensor] = []  # kept, so that identities are theirs alone

    def fetch(self) -> None:
        self.parcel.fetch()

    def put(self) -> None:
        self.parcel.fetch()
        flat_Z = self.parcel.here()
        if flat_Z is None:
            return
        views = {place: place.of(flat_Z) for place in self._places}
        self._each(lambda t: views[self._place_of[id(t)]] if id(t) in self._place_of else t)

    def collect(self) -> None:
        number: dict[tuple[Any, ...], int] = {}  # tensors that share memory stay one
        tensors: list[Tensor] = []

        def identity(t: Tensor) -> tuple[Any, ...]:
            return (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())

        def look(t: Tensor) -> Tensor:
            if self._moves(t) and identity(t) not in number:
                number[identity(t)] = len(tensors)
                tensors.append(t)
            return t

        self._each(look)
        places, nbytes = lay_out_bytes(tensors)
        flat_Z = self.parcel.here()
        if flat_Z is None or places != self._places:
            flat_Z = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        for tensor, place in zip(tensors, places, strict=True):
            view = place.of(flat_Z)
            if view.data_ptr() != tensor.data_ptr():  # new, or not changed in place
                view.copy_(tensor)
        standing = [torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device="meta") for p in places]
        self._each(lambda t: standing[number[identity(t)]] if self._moves(t) else t)
        self._places, self._standing = places, standing
        self._place_of = {id(stand): place for stand, place in zip(standing, places, strict=True)}
        self.parcel.resize(nbytes)
        self.parcel.send(flat_Z)

    def settle(self) -> None:
        self.parcel.settle()

    def forget(self) -> None:
        self.parcel.forget()

    def read(self, master: nn.Parameter) -> State:
        if not self._places:
            return super().read(master)
        bytes_Z = self.parcel.on_host()
        places = self._place_of
        state: State = transform(super().read(master), lambda t: places[id(t)].of(bytes_Z) if id(t) in places else t)
        return state

    def device_bytes(self) -> int:
        return super().device_bytes() + self.parcel.device_bytes

    def host_bytes(self) -> int:
        return super().host_bytes() + self.parcel.nbytes


class MappedStates(DeviceStates):
    """States in the host's memory, mapped into the device's: the optimizer computes with them there, and nothing is copied.

    Such memory is only safe in arithmetic (no copies, no reading of its address), so values are set and read by a product with one.
    """

    def __init__(self, masters: list[nn.Parameter], states: States, device: Device) -> None:
        super().__init__(masters, states, device)
        self._mapped: dict[int, Tensor] = {}

    def collect(self) -> None:
        known, self._mapped = self._mapped, {}

        def change(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                if not self._moves(tensor):
                    return tensor
                mapped = self.device.swapped_empty(tensor.shape, tensor.dtype)
                assert mapped is not None
                tensor = mapped.fill_(1).mul_(tensor)
            self._mapped[id(tensor)] = tensor
            return tensor

        self._each(change)

    def read(self, master: nn.Parameter) -> State:
        def on_host(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor).fill_(1).mul_(tensor).cpu() if id(tensor) in self._mapped else tensor

        state: State = transform(super().read(master), on_host)
        return state

    def _bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._mapped.values())

    def _storages(self) -> dict[int, tuple[Tensor, int]]:
        storages: dict[int, tuple[Tensor, int]] = {}

        def look(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._mapped:
                storages[id(tensor)] = (tensor, tensor.numel() * tensor.element_size())
            return tensor

        self._each(look)
        return storages

    def host_bytes(self) -> int:
        return super().host_bytes() + self._bytes()


def states_for(
    where: str, masters: list[nn.Parameter], states: States, device: Device, copies: CopyEngine, pool: HostPool
) -> DeviceStates:
    """The states of a bucket's masters in a tier; `where`: device, host or mapped."""
    if where == "host":
        return HostStates(masters, states, device, copies, pool)
    return (MappedStates if where == "mapped" else DeviceStates)(masters, states, device)
