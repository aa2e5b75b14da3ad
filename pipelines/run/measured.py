"""The settings that a step's time and memory depend on, and measurements that were taken under such settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmspeed.axes import ITEMS
from mmspeed.config import RunConfig
from mmspeed.config.memory import MemoryConfig
from mmspeed.data.sampling.batch_sizes import Measured
from mmspeed.errors import UserError
from mmspeed.pipelines.run.compiling import compiling
from mmspeed.protocols import RunPlace

# Settings in which the measurements of another run may differ: a warning says so, and they are used all the same.
WARNED_SETTINGS = ("parallel.strategy", "devices", "device.name")
UNUSED = ("torch",)  # recorded for information
UNMEASURED = ("empty_cache", "snapshot")  # keys of the memory section that do not affect a step's time and memory


def setting_of(config: RunConfig, task: Mapping[str, object], place: RunPlace) -> dict[str, Any]:
    """The settings that a step's time and memory depend on beside shape and batch, flat, in JSON's types; `task`: the task's part."""
    axes = config.parallel.sizes()
    setting = {
        **task,
        "device.dtype": config.device.dtype,
        "train.compile": compiling(config, place.device).on,
        "device.kind": place.device.kind,
        "device.name": place.device.name,
        "devices": place.world,
        "parallel.strategy": place.strategy,
        **{f"parallel.{axis}": size for axis, size in axes.items() if axis not in ITEMS},
        "parallel.shard": config.parallel.shard,
        "torch": torch.__version__,
    }
    usual = MemoryConfig().model_dump(mode="json")
    memory = config.memory.model_dump(mode="json")
    setting |= {
        f"memory.{key}": value for key, value in memory.items() if value != usual[key] and key not in UNMEASURED
    }
    if config.train.optimizer != "adamw":
        setting["train.optimizer"] = config.train.optimizer
    if place.strategy == "fsdp":
        setting |= {f"parallel.{axis}": size for axis, size in axes.items() if axis in ITEMS}
    return setting


def load_measured(path: Path, setting: Mapping[str, Any]) -> tuple[Measured, str | None]:
    """The measurements of a run, and a warning about them, if there is one.

    Raises UserError when there are none, and when they were taken of another model, number type or kind of device, or with
    other recomputation or compilation, than `setting` has.
    """
    measured = Measured.load(path)
    before = measured.setting
    other = [
        name
        for name in {**setting, **before}
        if (before.get(name) or None) != (setting.get(name) or None) and name not in UNUSED
    ]

    def shown(names: Sequence[str]) -> str:
        return ", ".join(f"{name} ({before.get(name)}, here {setting.get(name)})" for name in names)

    wrong = [name for name in other if name not in WARNED_SETTINGS and not name.startswith("parallel.")]
    if wrong:
        raise UserError(
            f"{path} was measured with other settings: {shown(wrong)}; run `mmspeed bench buckets CONFIG` again"
        )
    if other:
        return (
            measured,
            f"{path.name} was measured with other settings: {shown(other)}; time and memory may be different here",
        )
    return measured, None
