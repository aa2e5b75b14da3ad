"""Measure a step's memory with torch's MemTracker, which sees every tensor that an operation returns, on any device.

It does not see an operation's own workspace; a report's `counted_peak`, the allocator's own figure, includes it.
Importing this module imports torch's compiler, which takes half a second: import it only to measure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mmspeed.device import Device
from mmspeed.torch_internals import memory_kinds, memory_tracker_class

from .peak import no_collector
from .report import LayerMemory, MemoryReport, optimizer_bytes

AT_THE_END = "end of forward"  # what is freed or made after the last layer, such as autocast's copies of weights

_MemoryKind = memory_kinds()


class _Tracker(memory_tracker_class()):  # type: ignore[misc]
    """A tracker that also knows the phase and module of the peak, and the bytes that the forward pass had left when each layer began."""

    def __init__(self, model: nn.Module, device: Device) -> None:
        super().__init__(device.torch_device)
        self.model = model
        self.names = weakref.WeakKeyDictionary({part: name for name, part in model.named_modules()})
        self.layers = {part: name for name, part in layers_of(model)}
        self.begun: list[tuple[str, int]] = []  # layers in the order in which they ran, and activations then
        self.ended = self.left = 0  # activations after the last layer, and after the model
        self.latest: nn.Module | None = None  # of the modules that backward has reached
        self.phase, self.module = "forward", ""
        self._behind = False  # whether backward has begun

    def own(self, optimizer: Any) -> None:
        """Count an optimizer's tensors on the device: its states, and weights that are not the model's."""
        inner = optimizer if isinstance(optimizer, Optimizer) else optimizer.inner
        self.track_external(inner)
        for group in inner.param_groups:
            for weight in group["params"]:
                if weight.device == self.device:
                    self.count(_MemoryKind.OPT, weight)  # known ones keep their kind

    def bytes_of(self, kind: str, at: str = "current") -> int:
        return int(self.get_tracker_snapshot(at).get(self.device, {}).get(kind, 0))

    def _now(self) -> str:
        if self.in_backward:
            return "backward"
        if len(self.running) > 1:
            return "forward"
        return "update" if self._behind else "loss" if self.begun else "batch"

    def kind_of(self, kind: Any) -> Any:
        self._behind = self._behind or self.in_backward
        # computed again, or in the update
        return _MemoryKind.TEMP if kind == _MemoryKind.ACT and self._behind else kind

    def peak_grew(self) -> None:
        self.phase = self._now()
        self.module = self._at_work()

    def _at_work(self) -> str:
        """The name of the innermost module that is running; in backward, of the one reached last."""
        part = self.latest
        if self.phase == "forward":
            known = {stats.mod_fqn: part for part, stats in self.memory_tracking.items()}
            active = sorted((name for name in self.running if name in known), key=lambda n: n.count("."))
            part = known[active[-1]] if active else None
        elif self.phase != "backward":
            part = None
        return "" if part is None else self.names.get(part, "")

    def before_forward(self, module: nn.Module) -> None:
        if module in self.layers and not self.in_backward:
            self.begun.append((self.layers[module], self.bytes_of(_MemoryKind.ACT)))
        if self.in_backward:
            self.latest = module

    def after_forward(self, module: nn.Module) -> None:
        if self.in_backward:
            return
        if self.begun and self.layers.get(module) == self.begun[-1][0]:
            self.ended = self.bytes_of(_MemoryKind.ACT)
        if module is self.model:
            self.left = self.bytes_of(_MemoryKind.ACT)

    def before_backward(self, module: nn.Module) -> None:
        if not self._lies_in(self.latest, module):  # the last part of a module is reported before the module
            self.latest = module
        if module in self.layers:  # sharded parameters get their gradients without the hooks that would report it
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    self.recount(_MemoryKind.GRAD, parameter.grad)

    def _lies_in(self, inner: nn.Module | None, outer: nn.Module) -> bool:
        return inner is not None and f"{self.names.get(inner, '')}.".startswith(f"{self.names.get(outer, '')}.")

    def kept(self) -> tuple[LayerMemory, ...]:
        """The bytes that each layer left behind, in the order of their first runs."""
        starts = [*self.begun, (AT_THE_END, self.ended), ("", self.left)]
        kept: dict[str, int] = {}
        for (name, before), (_, after) in pairwise(starts):
            kept[name] = kept.get(name, 0) + after - before
        return tuple(LayerMemory(name, count) for name, count in kept.items())


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model that a report lists: its children, and the members of its lists."""
    layers: list[tuple[str, nn.Module]] = []
    for name, part in model.named_children():
        listed = isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        layers += [(f"{name}.{inner}", each) for inner, each in part.named_children()] if listed else [(name, part)]
    return layers


def measure_step(
    model: nn.Module,
    optimizer: Any,
    work: Callable[[], object],
    *,
    device: Device,
    setting: str,
    average: Iterable[Tensor] = (),
    host: Callable[[], Mapping[str, int]] = dict,
    counted_peak: int | None = None,
) -> MemoryReport:
    """The memory of `work`, one step with one forward pass, after a first one that made the optimizer's states.

    Args:
        model: without a wrapper around it, so that its layers have their own names. Blocks that torch.compile has compiled are not seen.
        optimizer: of torch, or a tiered one, which gives its bytes by `device_bytes`.
        average: the moving average's tensors, as far as they are on the device.
        host: gives, after the step, its bytes in the host's memory by name.
    """
    tracker = _Tracker(model, device)
    tracker.track_external(model, *average)
    tracker.own(optimizer)
    held = optimizer_bytes(optimizer)
    unseen = max(0, held - tracker.bytes_of(_MemoryKind.OPT))  # the 16 bits that bfloat16 weights lack
    with no_collector(), tracker:
        work()
    at_peak = {kind: tracker.bytes_of(kind, "peak") for kind in _MemoryKind}
    optimizing = min(at_peak[_MemoryKind.OPT], held - unseen)
    categories = {
        "parameters": at_peak[_MemoryKind.PARAM] + at_peak[_MemoryKind.BUFFER],
        "gradients": at_peak[_MemoryKind.GRAD],
        "optimizer": optimizing + unseen,
        "average": at_peak[_MemoryKind.OTH],
        "activations": at_peak[_MemoryKind.ACT],
        "temporary": at_peak[_MemoryKind.TEMP] + at_peak[_MemoryKind.OPT] - optimizing,
    }
    in_host = {name: count for name, count in host().items() if count}
    peak, layers = sum(categories.values()), tracker.kept()
    return MemoryReport(
        device.name, setting, peak, tracker.phase, tracker.module, categories, in_host, layers, counted_peak
    )
