"""The lines that a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmspeed.config import Config, RunConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.loop.optimizers.learning_rate import learning_rate
from mmspeed.loop.optimizers.make_optimizer import muon_share
from mmspeed.models.sections import size_of
from mmspeed.parallel import unwrap
from mmspeed.protocols import Data, SizedData


def device_line(config: RunConfig, device: Device, world: int, strategy: str) -> str:
    """The devices, the number type of forward and backward, and the layout: `device: cpu (AMD EPYC), float32, one process`."""
    parts = [f"{device.kind} ({device.name})", config.device.dtype]
    if (flash := device.flash()) is not None and flash.state != "absent":
        parts.append(flash.words)
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


def optimizer_line(config: RunConfig, models: Mapping[str, nn.Module]) -> str | None:
    """The share of the parameters that Muon updates, in each role that learns; None for another optimizer."""
    if config.train.optimizer != "muon":
        return None
    shares = [
        f"{muon_share(model):.1%} of the parameters{f' of {role}' * (len(models) > 1)}"
        for role, model in models.items()
    ]
    return (
        f"optimizer: muon for {' and '.join(shares)}, the matrices of blocks and of their experts; adamw for the rest"
    )


def rate_line(before: TrainConfig, now: TrainConfig, step: int) -> str | None:
    """A warning where the learning rate rises again at step number `step` (from 0) because `train.steps` has been raised; else None."""
    planned = learning_rate(step, now.model_copy(update={"steps": before.steps}))
    last, rate = learning_rate(step - 1, before), learning_rate(step, now)
    if not step or rate <= 1.01 * planned:
        return None
    return (
        f"step {step}: the learning rate rises from {last:.3g} to {rate:.3g}, since the {now.schedule} course was of {before.steps:,} steps "
        f"and is of {now.steps:,} now: to train on at a low rate set train.schedule: constant and train.lr; for a whole course from these "
        "weights begin a new run with train.start_from"
    )


def data_line(data: Data, steps: int) -> str | None:
    """The samples, the steps of an epoch, and the epochs of `steps`; None for data that do not know their size."""
    if not isinstance(data, SizedData):
        return None
    size = data.size
    left_out = f"; {size.left_out:,} more without a token to predict are left out" if size.left_out else ""
    return (
        f"data: {size.samples:,} samples, {size.steps_per_epoch:,} steps an epoch; "
        f"{steps:,} steps are {steps / size.steps_per_epoch:.3g} epochs{left_out}"
    )


def in_short(count: float) -> str:
    """A count in three digits: `812`, `3.21 M`, `14.2 B`."""
    for unit in ("", " k", " M", " B", " T"):
        if count < 999.5 or unit == " T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError("unreachable")
