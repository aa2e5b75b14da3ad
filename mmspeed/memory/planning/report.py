"""Report a device's memory during one training step: by category at the peak, and by layer. `tracked` measures it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from inspect import ismethod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mmspeed.log import format_bytes
from mmspeed.memory.offload.copies import HostPool
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.recompute.regions import runners_of

from .peak import local_bytes

CATEGORIES = ("parameters", "gradients", "optimizer", "average", "activations", "temporary")
MEANING = {
    "parameters": "weights and buffers, with those gathered from other devices",
    "gradients": "of the parameters",
    "optimizer": "its states, and weights that it keeps",
    "average": "the moving average of the weights",
    "activations": "tensors that forward keeps for backward, and the batch",
    "temporary": "tensors made and freed in backward or in the update, such as recomputed ones",
}


@dataclass(frozen=True)
class LayerMemory:
    """A layer of the model, with the computation up to the next. `kept`: bytes that its forward leaves for backward."""

    name: str
    kept: int


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one training step on one device. `categories` are bytes at the peak and sum to `peak`; `host` is beside the device."""

    device: str
    setting: str  # a description of the step
    peak: int
    phase: str  # of the step at the peak: forward, loss, backward or update
    module: str  # the innermost that was at work at the peak; "" outside of the model
    categories: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    layers: tuple[LayerMemory, ...] = ()
    counted_peak: int | None = None  # as the allocator counts

    @property
    def kept(self) -> int:
        """Bytes that the whole forward pass leaves for backward."""
        return sum(layer.kept for layer in self.layers)

    def lines(self) -> list[str]:
        """The report as a table for a terminal."""
        where = f"{self.phase} of {self.module}" if self.module else self.phase
        counted = "" if self.counted_peak is None else f"; the allocator counted {format_bytes(self.counted_peak)}"
        lines = [
            f"{self.setting} on {self.device}: peak {format_bytes(self.peak)} in the {where}{counted}",
            f"{'at the peak':<14} {'bytes':>10} {'share':>7}",
        ]
        for name, count in self.categories.items():
            lines.append(f"{name:<14} {format_bytes(count):>10} {count / max(1, self.peak):>7.1%}  {MEANING[name]}")
        if self.host:
            lines.append("in the host's memory: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in self.host.items()))
        if self.layers:
            lines.append(f"kept for backward: {format_bytes(self.kept)}, of which")
            lines += [f"  {names:<24} {format_bytes(kept):>10}" for names, kept in runs_of(self.layers)]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MemoryReport:
        """The report that `to_json` wrote. Raises TypeError or KeyError for other values."""
        return cls(**{**record, "layers": tuple(LayerMemory(**layer) for layer in record["layers"])})


def runs_of(layers: Iterable[LayerMemory]) -> list[tuple[str, int]]:
    """The rows of layers in their order, without those that keep nothing.

    Neighbours that keep the same within 1 % are one row such as "blocks.0 to blocks.6, each", with the most of them.
    """
    rows: list[list[LayerMemory]] = []
    for layer in layers:
        if rows and abs(rows[-1][0].kept - layer.kept) <= 0.01 * abs(layer.kept):
            rows[-1].append(layer)
        else:
            rows.append([layer])
    return [
        (
            row[0].name if len(row) == 1 else f"{row[0].name} to {row[-1].name}, each",
            max((layer.kept for layer in row), key=abs),
        )
        for row in rows
        if row[0].kept
    ]


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes that an optimizer holds on the device between steps, beside the parameters; for a tiered one, by its `device_bytes`."""
    if isinstance(optimizer, Optimizer):
        states = optimizer.state.values()
        return local_bytes(value for state in states for value in state.values() if torch.is_tensor(value))
    held = optimizer.device_bytes()
    return int(held["master"] + held["states"])


def host_pools(model: nn.Module) -> list[HostPool]:
    """The host pools that the spans of a model's blocks offload to."""
    pools: dict[int, HostPool] = {}
    for part in model.modules():
        for runner in runners_of(part):
            maker = runner.groups.__self__ if ismethod(runner.groups) else None
            if isinstance(maker, Offloader):
                pools[id(maker.pool)] = maker.pool
    return list(pools.values())
