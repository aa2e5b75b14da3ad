"""Tasks: what the trainer must know of each domain. The table that names them is `mmspeed/config/tasks.py`."""

from __future__ import annotations

from typing import Any

from mmspeed.config import RunConfig
from mmspeed.config.tasks import TASKS, TaskEntry, task_class
from mmspeed.protocols import Task


def register(name: str, task: str, config: str | None = None, preparation: str | None = None) -> None:
    """Make a task known to this process, by its name in configs. Before the first config of it is read.

    The others are "module:class", as in `TaskEntry`. Processes that this one starts with the command line (`--nproc`) do not know it:
    for these an installed package declares it, as an entry point of the group `mmspeed.tasks`.
    """
    TASKS[name] = TaskEntry(task, config, preparation, origin="this program")


def make_task(config: RunConfig, maker: Any = None) -> Task:
    """The task that a config names. Raises UserError for one that is not known or cannot be imported."""
    task: Task = task_class(config.task)(config, maker)
    return task
