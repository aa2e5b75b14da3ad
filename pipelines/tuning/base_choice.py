"""Choose how the frozen base of adapters is kept on a device of so much memory, from the figures of `check`: shapes alone, no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mmspeed.config import Config, RunConfig
from mmspeed.config.adapters import BaseConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_estimate import MemoryPlan, plan_memory

# the least slow first: int8 is multiplied out in each product, and swapped weights wait for the host
BASES: tuple[tuple[Literal["bfloat16", "int8"], Literal["device", "host"]], ...] = (
    ("bfloat16", "device"),
    ("int8", "device"),
    ("bfloat16", "host"),
    ("int8", "host"),
)


def choose_base(
    config: Config | LanguageConfig, budget: int, opened: Callable[[RunConfig], Task] | None = None
) -> tuple[BaseConfig, MemoryPlan]:
    """The first of the ways to keep the base in which a step of the config fits in `budget` bytes, and its plan.

    opened: makes the task of a config, opened without data; None: by its name. Raises UserError where none fits, with the least that a step
    takes.
    """
    least = 0
    for dtype, place in BASES:
        base = BaseConfig(dtype=dtype, place=place)
        own = config.model_copy(update={"model": config.model.model_copy(update={"base": base})})
        plan = plan_memory(own, task=None if opened is None else opened(own), budget=budget)
        if plan.chosen is not None:
            return base, plan
        least = plan.figures.least()
    raise UserError(
        f"--memory: a step takes at least {format_bytes(least)} with an int8 base on the host, more than {format_bytes(budget)}: "
        "use smaller buckets, or shorter ones, or several devices (parallel)"
    )
