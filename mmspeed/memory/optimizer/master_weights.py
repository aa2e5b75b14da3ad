"""Hold the float32 weights (the masters) of one bucket of parameters between the steps of an optimizer.

| tier       | between steps                                         | bytes per parameter on the device, beside the states |
| ---------- | ----------------------------------------------------- | ---------------------------------------------------- |
| parameters | the parameters are float32, and are the masters       | 4                                                    |
| float32    | bfloat16 parameters and float32 masters               | 6                                                    |
| split      | bfloat16 parameters and the 16 bits that these lack   | 4                                                    |
| host       | bfloat16 parameters; the 16 bits in the host's memory | 2                                                    |

A master is the part of its parameter that this process holds; parameters that are split over processes are DTensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from mmspeed.device import Device
from mmspeed.memory.offload.copies import CopyEngine, HostPool
from mmspeed.memory.offload.host_buffers import OffloadedBuffer, lay_out
from mmspeed.torch_internals import copy_each_, is_sharded

from .split_bits import halves_of, join, rounded, split


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory."""
    with torch.no_grad():
        return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The part of a parameter's gradient that this process holds, in float32, summed over processes if it was not yet."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_sharded(parameter) and is_sharded(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient).to(torch.float32)


class Masters(ABC):
    """The masters of one bucket. The optimizer knows them as `masters`, which have values between `open` and `close`."""

    dtype = torch.bfloat16  # of the parameters
    parcel: OffloadedBuffer | None = None  # the part in the host's memory

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        self.parameters, self.device = parameters, device
        for parameter in parameters:
            if parameter.dtype != self.dtype:
                raise ValueError(f"the parameters are {self.dtype} with this tier of masters, not {parameter.dtype}")
        self.places, self.size = lay_out(local_part(p) for p in parameters)
        self.masters: list[nn.Parameter] = []

    def fetch(self) -> None:
        """Begin to bring to the device the bytes that lie elsewhere."""
        if self.parcel is not None:
            self.parcel.fetch()

    def settle(self) -> None:
        """Free the device's memory of bytes that have left."""
        if self.parcel is not None:
            self.parcel.settle()

    def forget(self) -> None:
        """Free the device's memory of bytes that were only read."""
        if self.parcel is not None:
            self.parcel.forget()

    @abstractmethod
    def open(self) -> None:
        """Give the masters their values."""

    @abstractmethod
    def close(self) -> None:
        """Round the masters' values into the parameters, and begin to move the rest to its tier."""

    @abstractmethod
    def values(self) -> list[Tensor]:
        """The masters' values, read-only, valid until the next call of any method."""

    @abstractmethod
    def write(self, index: int, values: Tensor) -> None:
        """Set one master's values, and its parameter."""

    def device_bytes(self) -> int:
        """Bytes on the device, without the parameters' own."""
        return 0

    def host_bytes(self) -> int:
        """Bytes in the host's memory."""
        return 0

    def _views(self, flat_Z: Tensor) -> list[Tensor]:
        return [place.of(flat_Z) for place in self.places]

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.size, dtype=dtype, device=self.device.torch_device)

    def _gathered(self) -> Tensor:
        """The parameters, flat."""
        flat_Z = self._empty(self.dtype)
        copy_each_(self._views(flat_Z), [local_part(p) for p in self.parameters])
        return flat_Z

    def _scatter(self, flat_Z: Tensor) -> None:
        copy_each_([local_part(p) for p in self.parameters], self._views(flat_Z))


class ParameterMasters(Masters):
    """Masters that are the parameters themselves."""

    dtype = torch.float32

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        super().__init__(parameters, device)
        self.masters = [nn.Parameter(local_part(p)) for p in parameters]

    def open(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.data = local_part(parameter)  # a parameter may have moved since

    def close(self) -> None:
        pass

    def values(self) -> list[Tensor]:
        return [local_part(p) for p in self.parameters]

    def write(self, index: int, values: Tensor) -> None:
        local_part(self.parameters[index]).copy_(values)


class Float32Masters(Masters):
    """Masters beside the parameters."""

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        super().__init__(parameters, device)
        self._flat_Z = self._gathered().float()
        self.masters = [nn.Parameter(view) for view in self._views(self._flat_Z)]

    def open(self) -> None:
        pass

    def close(self) -> None:
        hi_Z = self._empty(self.dtype)
        split(self._flat_Z, hi_Z)
        self._scatter(hi_Z)

    def values(self) -> list[Tensor]:
        return self._views(self._flat_Z)

    def write(self, index: int, values: Tensor) -> None:
        self.masters[index].data.copy_(values)
        local_part(self.parameters[index]).copy_(rounded(values))

    def device_bytes(self) -> int:
        return self._flat_Z.untyped_storage().nbytes()


class SplitMasters(Masters):
    """Masters that exist only during a step, made of the parameters and the 16 bits that these lack."""

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        super().__init__(parameters, device)
        self._flat_Z: Tensor | None = None
        self._away()
        self._rest_Z = self._first_rest()

    def _first_rest(self) -> Tensor | None:
        return self._empty(torch.int16).zero_()

    def _away(self) -> None:
        """Leave the masters their shapes without memory; their values read as NaN."""
        nothing = torch.full((), float("nan"), device=self.device.torch_device)
        stand_ins = [nothing.expand(place.shape) for place in self.places]
        if not self.masters:
            self.masters = [nn.Parameter(stand_in) for stand_in in stand_ins]
        for master, stand_in in zip(self.masters, stand_ins, strict=True):
            master.data = stand_in
        self._flat_Z = None

    def _rest(self) -> Tensor:
        assert self._rest_Z is not None
        return self._rest_Z

    def _keep(self, rest_Z: Tensor) -> None:
        """Store the rest, which has changed in place."""

    def _joined(self) -> Tensor:
        flat_Z = self._empty(torch.float32)
        join(self._gathered(), self._rest(), flat_Z)
        return flat_Z

    def open(self) -> None:
        self._flat_Z = self._joined()
        for master, view in zip(self.masters, self._views(self._flat_Z), strict=True):
            master.data = view

    def close(self) -> None:
        assert self._flat_Z is not None
        hi_Z, rest_Z = self._empty(self.dtype), self._rest()
        split(self._flat_Z, hi_Z, rest_Z)
        self._away()
        self._scatter(hi_Z)
        self._keep(rest_Z)

    def values(self) -> list[Tensor]:
        return self._views(self._joined())

    def write(self, index: int, values: Tensor) -> None:
        hi, lo = halves_of(values)
        local_part(self.parameters[index]).copy_(hi)
        self.places[index].of(self._rest_on_host()).copy_(lo)

    def _rest_on_host(self) -> Tensor:
        return self._rest()

    def device_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (self._rest_Z, self._flat_Z) if t is not None)


class HostMasters(SplitMasters):
    """Masters like `SplitMasters`, with the 16 bits in the host's memory."""

    parcel: OffloadedBuffer

    def __init__(self, parameters: list[nn.Parameter], device: Device, copies: CopyEngine, pool: HostPool) -> None:
        self.parcel = OffloadedBuffer(device, copies, pool)
        super().__init__(parameters, device)

    def _first_rest(self) -> None:
        self.parcel.resize(2 * self.size)
        self.parcel.on_host().zero_()

    def _rest(self) -> Tensor:
        self.parcel.fetch()
        bytes_Z = self.parcel.here()
        return self._empty(torch.int16) if bytes_Z is None else bytes_Z.view(torch.int16)

    def _keep(self, rest_Z: Tensor) -> None:
        self.parcel.send(rest_Z.view(torch.uint8))

    def _rest_on_host(self) -> Tensor:
        return self.parcel.on_host().view(torch.int16)

    def device_bytes(self) -> int:
        return super().device_bytes() + self.parcel.device_bytes

    def host_bytes(self) -> int:
        return self.parcel.nbytes


def masters_for(
    tier: str, parameters: list[nn.Parameter], device: Device, copies: CopyEngine, pool: HostPool
) -> Masters:
    """The masters of a bucket in a tier: parameters, float32, split or host. Parameters that stayed float32 are their own in every tier."""
    if tier == "parameters" or parameters[0].dtype == torch.float32:
        return ParameterMasters(parameters, device)
    if tier == "float32":
        return Float32Masters(parameters, device)
    return SplitMasters(parameters, device) if tier == "split" else HostMasters(parameters, device, copies, pool)
