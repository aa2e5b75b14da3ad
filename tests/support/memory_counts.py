"""Counters that show what a policy of memory does: matrix products that are computed, bytes that forward keeps, ways of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from mmspeed.config.memory import ActivationPolicy
from mmspeed.device import Device
from mmspeed.memory.planning.measure import operations
from mmspeed.memory.recompute.region import RegionPolicy
from mmspeed.memory.recompute.regions import region_modules, regions_of, runners_of
from mmspeed.torch_internals import TorchDispatchMode


class MatmulCounter(TorchDispatchMode):
    """A mode that counts the matrix products that are computed, by operator. Those that a region returns without computing do not count.

    `work` is their floating-point operations, where torch has a formula for the operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.work = 0
        self._operators = RegionPolicy(matmul="save").op_policies().keys()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._operators:
            self.calls[str(func)] += 1
            self.work += operations(func, args, kwargs or {}, out)
        return out


def kept_bytes(device: Device, model: nn.Module, forward: Callable[[], object], inputs: Iterable[Tensor] = ()) -> int:
    """Bytes of the device that are in use after `forward` and were not before, while its result is held.

    inputs: tensors that exist before; those that are not listed count as far as forward keeps them.
    """
    tracker = MemTracker()
    tracker.track_external(model, *inputs)
    with tracker:
        before = tracker.get_tracker_snapshot().get(device.torch_device, {}).get("Total", 0)
        result = forward()
        after = tracker.get_tracker_snapshot().get(device.torch_device, {}).get("Total", 0)
    if isinstance(result, Tensor) and result.requires_grad:
        # the tracker's hooks hold a graph until a backward pass went through it
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in weights]
        for parameter in weights:
            parameter.grad = None
        # not `grad`: the tracker hooks arguments of modules, and where one is a parameter torch refuses that
        torch.autograd.backward(result.sum(), inputs=weights)
        for parameter, gradient in zip(weights, gradients, strict=True):
            parameter.grad = gradient
    return int(after - before)


def policies_of(block: nn.Module) -> dict[str, ActivationPolicy]:
    """The policies that `set_policies` gave to the regions of a block, by region; one that saves all is left out."""
    regions = {"block": [block], **{name: region_modules(block, name) for name in regions_of(block)}}
    runners_by_region = {
        name: [runner for module in modules for runner in runners_of(module)] for name, modules in regions.items()
    }
    return {name: runners[0].way for name, runners in runners_by_region.items() if runners}
