"""Exponential moving average of the weights, sharded like the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.device import Device
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.parallel import unwrap
from mmspeed.parallel.tensor import local
from mmspeed.torch_internals import lerp_each_

from .checkpoint.state import declared_state, has_masters, laid_out, named_masters
from .host_averages import HostAverages


def ema_decay(decay: float, updates: int) -> float:
    """Decay after `updates` updates, warmed up as min(decay, (1 + n) / (10 + n))."""
    return min(decay, (1 + updates) / (10 + updates))


class EMA:
    """The average of a model's float32 weights that train, and of the buffers that it declares as averaged.

    Make it after `parallelize`: it copies the parameters' sharding.

    `optimizer` holds the float32 weights where the model's parameters are roundings of them. `host`: the averages are in the memory of
    that device's host, and come to the device in buckets of `bucket_bytes`. `tensors` maps the bare model's names to the averages;
    `updates` counts the updates.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        optimizer: Any = None,
        host: Device | None = None,
        bucket_bytes: int = 1 << 26,
    ) -> None:
        self.decay = decay
        self.updates = 0
        self.optimizer: TieredOptimizer | None = optimizer if has_masters(model, optimizer) else None
        self._swapped = False
        self._kept: dict[str, Tensor] = {}
        self._state = [name for name, rule in declared_state(model).items() if rule == "averaged"]
        averaged = self._averaged(model)
        for name in self._state:
            if averaged[name].dtype != torch.float32:
                raise ValueError(f"`{name}` is {averaged[name].dtype}; a buffer that is averaged is float32")
        if self.optimizer is not None:  # in the order in which its buckets come
            trained = [name for name, _, _ in named_masters(model, self.optimizer)]
            averaged = {name: averaged[name] for name in [*trained, *self._state]}
        self._host: HostAverages | None = None
        if host is not None:
            self._host = HostAverages([local(tensor) for tensor in averaged.values()], bucket_bytes, host)
            pairs = zip(averaged.items(), self._host.tensors(), strict=True)
            self.tensors = {name: laid_out(tensor, average) for (name, tensor), average in pairs}
        elif self.optimizer is not None:
            self.tensors = {
                name: laid_out(tensor, torch.empty_like(local(tensor), dtype=torch.float32))
                for name, tensor in averaged.items()
            }
        else:
            self.tensors = {name: tensor.detach().clone() for name, tensor in averaged.items()}
        if self._host is not None or self.optimizer is not None:
            self.restart(model)

    @property
    def on_host(self) -> bool:
        """True where the averages are in the host's memory."""
        return self._host is not None

    def _averaged(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters that train, then the buffers that are averaged, by name."""
        bare = unwrap(model)
        trained = {name: parameter for name, parameter in bare.named_parameters() if parameter.requires_grad}
        return trained | {name: bare.get_buffer(name) for name in self._state}

    def _weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """(name, this process's part) of each weight, in the order of `tensors`; a part may be freed when the next one is yielded."""
        if self.optimizer is not None:
            yield from ((name, values) for name, _, values in named_masters(model, self.optimizer))
            yield from ((name, unwrap(model).get_buffer(name)) for name in self._state)
        else:
            averaged = self._averaged(model)
            yield from ((name, local(averaged[name].detach())) for name in self.tensors)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the averages towards the model's weights. Call after each optimizer step that was taken."""
        if self._swapped:
            raise RuntimeError("the moving average was updated while it is swapped into the model")
        self.updates += 1
        weight = 1 - ema_decay(self.decay, self.updates)
        if self._host is not None:
            self._host.lerp((values for _, values in self._weights(model)), weight)
        elif self.optimizer is not None:
            for name, values in self._weights(model):
                lerp_each_([local(self.tensors[name])], [values], weight)
        else:
            averaged = self._averaged(model)
            weights = [local(averaged[name]) for name in self.tensors]
            lerp_each_([local(t) for t in self.tensors.values()], weights, weight)

    @torch.no_grad()
    def begin_state(self, model: nn.Module, names: Collection[str]) -> None:
        """Restart the averages of the named buffers from their values: those that a checkpoint has no averages of."""
        for name in names:
            self.tensors[name].copy_(unwrap(model).get_buffer(name))

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Restart the averages from the model's weights."""
        self.updates = 0
        if self._host is not None:
            self._host.settle()
        for name, values in self._weights(model):
            local(self.tensors[name]).copy_(values)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the model's names, sharing memory with this object."""
        if self._swapped:
            raise RuntimeError("the moving average was read while it is swapped into the model")
        if self._host is not None:
            self._host.settle()
        return dict(self.tensors)

    @contextmanager
    def swap(self, model: nn.Module) -> Iterator[None]:
        """Swap the averages into the model (and the weights into this object) inside; afterwards both are back, bit for bit.

        Values are exchanged one tensor at a time, so the cost is one tensor of memory. Where the parameters are bfloat16, their bits are
        stored separately: the float32 weights that they round stay as they are.
        """
        if self._swapped:
            raise RuntimeError("the moving average is already swapped into the model")
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        if self._host is not None:
            self._host.settle()
        for name, tensor in self._averaged(model).items():
            average, weights = local(self.tensors[name]), local(tensor.detach())
            if self.optimizer is None or name in self._state:
                copy = weights.clone()
                weights.copy_(average)
                average.copy_(copy)
            elif self._swapped:
                weights.copy_(self._kept.pop(name))
            else:
                self._kept[name] = weights.clone()
                weights.copy_(average)
        self._swapped = not self._swapped
