"""What `mmspeed check CONFIG` tells of a budget of memory: the choice, estimated from shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspeed.config import RunConfig


def memory_lines(config: RunConfig) -> list[str]:
    """The step's memory and what the budget would choose; nothing without one. Raises UserError as `plan_memory`."""
    if not config.memory.chooses:
        return []
    from mmspeed.pipelines.tuning.memory_estimate import plan_memory

    return plan_memory(config, with_swap=config.device.kind != "cpu").lines()
