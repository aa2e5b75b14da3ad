"""The lines that a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmspeed.config import Config, RunConfig
from mmspeed.device import Device
from mmspeed.models.sections import size_of
from mmspeed.parallel import unwrap
from mmspeed.protocols import Data, SizedData


def device_line(config: RunConfig, device: Device, world: int, strategy: str) -> str:
    """The devices, the number type of forward and backward, and the layout: `device: cpu (AMD EPYC), float32, one process`."""
    parts = [f"{device.kind} ({device.name})", config.device.dtype]
    if world == 1:
        parts.append("one process")
    else:
        parts.append(f"{world} processes")
        parts.append({"ddp": "a replica each (ddp)", "fsdp": "sharded (fsdp)"}.get(strategy, strategy))
        if config.parallel.group > 1:
            parts.append(f"samples split over {config.parallel.group_in_words()}")
    return f"device: {', '.join(parts)}"


def model_line(config: RunConfig, models: Mapping[str, nn.Module]) -> str:
    """The models by role, with their parameters: `model: SoraDiT tiny, 3.2 M parameters`."""
    size = f" {size_of(config.model)}" if isinstance(config, Config) and len(models) == 1 else ""
    words = []
    for role, model in models.items():
        total = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        part = "" if trained == total else f", {in_short(trained)} of them trained"
        words.append(
            f"{'' if role == 'model' else role + ' '}{type(unwrap(model)).__name__}{size}, {in_short(total)} parameters{part}"
        )
    return f"model: {'; '.join(words)}"


def data_line(data: Data, steps: int) -> str | None:
    """The samples, the steps of an epoch, and the epochs of `steps`; None for data that do not know their size."""
    if not isinstance(data, SizedData):
        return None
    size = data.size
    return (
        f"data: {size.samples:,} samples, {size.steps_per_epoch:,} steps an epoch; "
        f"{steps:,} steps are {steps / size.steps_per_epoch:.3g} epochs"
    )


def in_short(count: float) -> str:
    """A count in three digits: `812`, `3.21 M`, `14.2 B`."""
    for unit in ("", " k", " M", " B", " T"):
        if count < 999.5 or unit == " T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError("unreachable")
