"""`mmspeed check CONFIG` beside the data: what a budget of memory would choose, and with `--parallel` the self-check of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmspeed.errors import UserError

if TYPE_CHECKING:
    from mmspeed.config import RunConfig


def check_parallel(config: RunConfig, layout: str, others: Mapping[str, object]) -> int:
    """Print the report; 0 where the layout passed, else 1. Raises UserError for options that go with another check."""
    given = next((name for name, value in others.items() if value is not None), None)
    if given is not None:
        raise UserError(f"--parallel checks a layout and reads no data set: not with {given}")
    from mmspeed.pipelines.selfcheck.run import selfcheck

    result = selfcheck(config, layout)
    print("\n".join(result.lines()))
    return 0 if result.passed else 1


def memory_lines(config: RunConfig) -> list[str]:
    """The step's memory and what the budget would choose; nothing without one. Raises UserError as `plan_memory`."""
    if not config.memory.chooses:
        return []
    from mmspeed.pipelines.tuning.memory_estimate import plan_memory

    return plan_memory(config, with_swap=config.device.kind != "cpu").lines()
