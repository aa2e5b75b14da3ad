"""The bench of the optimizer's tiers: bytes per parameter on the device and in the host's memory between steps, and time of a step.

All tiers with bfloat16 parameters must give the same bits: they differ only in the memory that holds their numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.memory import MemoryConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device, pick
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig

# (name, section, expected bytes per parameter on the device between steps)
TIERS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("float32 parameters, states on device (plain)", {}, 12),
    ("float32 parameters, states on host", {"states": "host"}, 4),
    ("bfloat16, float32 master, states on device", {"master": "float32"}, 14),
    ("bfloat16, split master, states on device", {"master": "split"}, 12),
    ("bfloat16, split master, states on host", {"master": "split", "states": "host"}, 4),
    ("bfloat16, master and states on host", {"master": "host", "states": "host"}, 2),
)
NEAR = 0.01  # relative tolerance of bytes per parameter: scalars and padding


@dataclass(frozen=True)
class TierModelSize:
    """The sizes of the model whose parameters are updated."""

    width: int = 384
    depth: int = 8
    heads: int = 6
    rank: int = 64


@dataclass(frozen=True)
class TierRow:
    """The results of a tier. Bytes are per parameter."""

    name: str
    wanted: float
    device: float
    host: float
    seconds: float
    time: float  # as a ratio to plain's
    equal: bool | None  # None: the first of its number type, with which the others are compared

    def passed(self) -> bool:
        return self.equal is not False and abs(self.device / self.wanted - 1) <= NEAR


def measure_tiers(
    size: TierModelSize,
    rounds: int = 3,
    device: str = "auto",
    bucket: str = "64MiB",
    progress: Callable[[str], None] = lambda text: None,
) -> list[TierRow]:
    """Measure steps of every tier on the same gradients."""
    where = pick(device)
    where.activate()
    config = SoraDiTConfig(
        width=size.width,
        depth=size.depth,
        heads=size.heads,
        latent_channels=16,
        text_width=64,
        adaln_rank=size.rank,
        arrangement="full",
    )
    rows: list[TierRow] = []
    truth: dict[bool, list[Tensor]] = {}
    plain = 0.0
    for name, section, wanted in TIERS:
        progress(name)
        memory = MemoryConfig(bucket=bucket, **section)
        model, optimizer = _model_and_optimizer(config, memory, where)
        steps = []
        for turn in range(rounds + 1):
            _set_gradients(model, turn)
            where.synchronize()
            start = time.perf_counter()
            optimizer.step()
            where.synchronize()
            steps.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
        seconds = statistics.median(steps[1:])
        plain = plain or seconds
        count = sum(p.numel() for p in model.parameters())
        on_device, on_host, weights = _held(model, optimizer)
        narrow = memory.master != "parameters"
        equal = None if narrow not in truth else all(map(torch.equal, truth[narrow], weights))
        truth.setdefault(narrow, weights)
        rows.append(TierRow(name, wanted, on_device / count, on_host / count, seconds, seconds / plain, equal))
    return rows


def _model_and_optimizer(config: SoraDiTConfig, memory: MemoryConfig, device: Device) -> tuple[nn.Module, Any]:
    model = SoraDiT(config).to(device.torch_device)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if memory.master != "parameters":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
            parameter.grad_dtype = torch.float32
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.1), memory, device)
    if isinstance(optimizer, TieredOptimizer) and memory.master != "parameters":
        for name, parameter in model.named_parameters():
            optimizer.set_master(parameter, values[name])
    return model, optimizer


def _set_gradients(model: nn.Module, turn: int) -> None:
    """Set the same gradients for every tier: numbers that bfloat16 represents exactly."""
    for place, parameter in enumerate(model.parameters()):
        grad = rng.normal((parameter.numel() % 997 + 1,), 0, "bench", "gradient", turn, place).bfloat16()
        whole = grad.repeat(-(-parameter.numel() // grad.numel()))[: parameter.numel()].view_as(parameter)
        parameter.grad = whole.to(parameter.device, torch.float32)


def _held(model: nn.Module, optimizer: Any) -> tuple[int, int, list[Tensor]]:
    """Bytes on the device and on the host, and the float32 weights."""
    if isinstance(optimizer, TieredOptimizer):
        weights = {id(parameter): master.detach().clone() for parameter, master in optimizer.masters()}
        masters = [weights[id(parameter)] for parameter in model.parameters()]
        return sum(optimizer.device_bytes().values()), sum(optimizer.host_bytes().values()), masters
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *states]
    return sum(t.numel() * t.element_size() for t in tensors), 0, [p.detach().clone() for p in model.parameters()]
