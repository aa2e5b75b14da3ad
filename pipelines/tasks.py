"""Tasks: the definitions of the domains for the trainer. `mmspeed/config/tasks.py` is the table of their names."""

from __future__ import annotations

from typing import Any

from mmspeed.config import RunConfig
from mmspeed.config.tasks import TASKS, TaskEntry, preparation_class, task_class
from mmspeed.protocols import Task


def register(name: str, task: str, config: str | None = None, preparation: str | None = None) -> None:
    """Register a task in this process, under its name in configs. Call it before the first config of the task is read.

    The other arguments are "module:class", as in `TaskEntry`. Processes that the command line starts (`--nproc`) do not know the task:
    for these an installed package declares it, as an entry point of the group `mmspeed.tasks`.
    """
    TASKS[name] = TaskEntry(task, config, preparation, origin="this program")


def make_task(config: RunConfig, maker: Any = None) -> Task:
    """The task that a config names. Raises UserError for a task that is not known or cannot be imported."""
    task: Task = task_class(config.task)(config, maker)
    return task


def maker_of(config: RunConfig) -> Any:
    """The encoder that completes a config's data in the first epoch; None where its task has none.

    Raises UserError for a task that is not known or cannot be imported.
    """
    kind = preparation_class(config.task)
    return None if kind is None else kind(config).maker()
