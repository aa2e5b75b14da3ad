"""`mmspeed check CONFIG` beside the data: policies, what a budget would choose, and with `--parallel` the self-check of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmspeed.config.tasks import preparation_class
from mmspeed.errors import UserError

from .preparations import not_there, preparation

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.protocols import CheckOutcome


def check_config(
    config: RunConfig, page: Path | None, suggest_buckets: int | None, ranks: Sequence[int] | None
) -> CheckOutcome:
    """What the task's preparation finds in the data; of a task without one, what the config will train.

    Raises UserError as these do, and for options that the task does not have.
    """
    made = preparation(config)
    if made is not None:
        return made.check(page, suggest_buckets, ranks)
    for option, value in (("--report", page), ("--suggest-buckets", suggest_buckets)):
        if value is not None:
            raise not_there(config.task, f"check {option}")
    from mmspeed.pipelines.report.task_check import check_task

    return check_task(config, ranks)


def check_parallel(config: RunConfig, layout: str, others: Mapping[str, object]) -> int:
    """Print the report; 0 where the layout passed, else 1. Raises UserError for options that go with another check."""
    given = next((name for name, value in others.items() if value is not None), None)
    if given is not None:
        raise UserError(f"--parallel checks a layout and reads no data set: not with {given}")
    from mmspeed.pipelines.selfcheck.run import selfcheck

    result = selfcheck(config, layout)
    print("\n".join(result.lines()))
    return 0 if result.passed else 1


def model_lines(config: RunConfig) -> list[str]:
    """Policies that the blocks of the model can have, and what a budget would choose. Raises UserError as `policy_lines` and `plan_memory`.

    Policies of a task without a preparation are in its report already.
    """
    prepared = preparation_class(config.task) is not None
    if not prepared and not config.memory.chooses:
        return []
    from mmspeed.pipelines.report.policies import policy_lines
    from mmspeed.pipelines.tasks import make_task

    task = make_task(config)
    lines = policy_lines(task, config) if prepared else []
    if not config.memory.chooses:
        return lines
    from mmspeed.pipelines.tuning.memory_estimate import plan_memory

    task.open_without_data()
    return [*lines, *plan_memory(config, task=task, with_swap=config.device.kind != "cpu").lines()]
