"""The preparation of a config's task, for the commands that need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspeed.config.tasks import preparation_class, prepared_tasks
from mmspeed.errors import UserError

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.protocols.preparation import Preparation


def preparation(config: RunConfig) -> Preparation | None:
    """The preparation of a config's task; None if its data need none."""
    kind = preparation_class(config.task)
    return None if kind is None else kind(config)


def needed_preparation(config: RunConfig, command: str) -> Preparation:
    """The preparation of a config's task. Raises UserError, which names the command, if it has none."""
    task_preparation = preparation(config)
    if task_preparation is None:
        raise unsupported_task(config.task, command)
    return task_preparation


def unsupported_task(task: str, command: str) -> UserError:
    """The error of a command that does not support a task."""
    return UserError(f"`mmspeed {command}` does not support the task {task} (only: {', '.join(prepared_tasks())})")
