"""Exponential moving average of the weights, kept in the shards that the model is kept in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmspeed.parallel import unwrap


def ema_decay(decay: float, updates: int) -> float:
    """Decay after `updates` updates, warmed up as min(decay, (1 + n) / (10 + n))."""
    return min(decay, (1 + updates) / (10 + updates))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EMA:
    """The average of a model's parameters. Make it after `parallelize`: it takes over the parameters' sharding.

    `tensors` maps the bare model's parameter names to the averages; `updates` counts them.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors: dict[str, Tensor] = {n: p.detach().clone() for n, p in unwrap(model).named_parameters()}
        self._swapped = False

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        parameters = dict(unwrap(model).named_parameters())
        return [_local(t) for t in self.tensors.values()], [_local(parameters[n].detach()) for n in self.tensors]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the averages towards the model's parameters. Call after each optimizer step that was taken."""
        if self._swapped:
            raise RuntimeError("the moving average was updated while it is swapped into the model")
        self.updates += 1
        averages, parameters = self._pairs(model)
        torch._foreach_lerp_(averages, parameters, 1 - ema_decay(self.decay, self.updates))

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Begin anew from the model's parameters."""
        self.updates = 0
        for average, parameter in zip(*self._pairs(model), strict=True):
            average.copy_(parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the model's names, sharing memory with this object."""
        if self._swapped:
            raise RuntimeError("the moving average was read while it is swapped into the model")
        return dict(self.tensors)

    @contextmanager
    def swap(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model holds the averages (and this object the weights); afterwards both are back, bit for bit.

        Values are exchanged one tensor at a time, so the cost is one tensor of memory.
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
        for average, parameter in zip(*self._pairs(model), strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
        self._swapped = not self._swapped
