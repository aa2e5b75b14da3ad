"""`mmspeed check CONFIG`: the data, the model's policies, what a memory budget would choose and with `--parallel` a layout's self-check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmspeed.config.tasks import preparation_class
from mmspeed.errors import UserError

from .preparations import preparation, unsupported_task

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.protocols import CheckOutcome


def check_config(
    config: RunConfig,
    page: Path | None,
    suggest_buckets: int | None,
    ranks: Sequence[int] | None,
    schedule: bool = False,
) -> CheckOutcome:
    """Check the data with the task's preparation; for a task without one, forecast the training.

    Raises UserError like these two, and for options that the task does not have.
    """
    task_preparation = preparation(config)
    if task_preparation is not None:
        tables = {"schedule": True} if schedule else {}
        return task_preparation.check(page, suggest_buckets, ranks, **tables)
    for option, value in (("--report", page), ("--suggest-buckets", suggest_buckets), ("--schedule", schedule or None)):
        if value is not None:
            raise unsupported_task(config.task, f"check {option}")
    from mmspeed.pipelines.check.data_report import check_task

    return check_task(config, ranks)


def check_parallel(config: RunConfig, layout: str, others: Mapping[str, object]) -> int:
    """Print the self-check of a layout; return 0 if it passed, else 1. Raises UserError for options of the other checks."""
    conflict = next((name for name, value in others.items() if value is not None), None)
    if conflict is not None:
        raise UserError(f"--parallel checks a layout and reads no sources: not with {conflict}")
    from mmspeed.pipelines.check.layouts import selfcheck

    result = selfcheck(config, layout)
    print("\n".join(result.lines()))
    return 0 if result.passed else 1


def check_official(config: RunConfig) -> int:
    """Print how the call that training makes of a published model compares with its official pipeline's; return 0 if they agree, else 1.

    Raises UserError for a model that has no official pipeline.
    """
    from mmspeed.config import video_config
    from mmspeed.pipelines.check.official import check_against_official
    from mmspeed.preprocess.build.excerpts import captions_by_key, clip_pictures

    own = video_config(config, "--against-official")
    checks = check_against_official(own, captions=lambda: captions_by_key(own), frames=clip_pictures)
    print("\n".join(line for check in checks for line in check.lines()))
    return 0 if all(check.passed for check in checks) else 1


def model_lines(config: RunConfig, report: CheckOutcome) -> list[str]:
    """Lines about the model, its policies, and a step's and the training's memory and time, of what the check of the data found.

    Raises UserError like `policy_lines` and `run_lines`. Those of a task without a preparation are in its report already.
    """
    if preparation_class(config.task) is None:
        return []
    from mmspeed.pipelines.check.data_report import build_lines
    from mmspeed.pipelines.report.policies import policy_lines
    from mmspeed.pipelines.report.run_forecast import run_lines
    from mmspeed.pipelines.tasks import make_task
    from mmspeed.protocols import ForecastsWork

    task, works = make_task(config), report.works if isinstance(report, ForecastsWork) else ()
    forecast = bool(works) or config.memory.chooses
    if forecast:
        task.domain.open_without_data()
    policies = [*policy_lines(task, config), *task.domain.exchange_lines()]
    if not forecast:
        return policies
    return [*build_lines(task, task.build()), *policies, *run_lines(config, task, works)]
