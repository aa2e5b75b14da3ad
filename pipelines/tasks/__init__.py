"""Tasks: what the trainer must know of each domain, and the table that names them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmspeed.config import RunConfig
from mmspeed.config.tasks import CONFIGS
from mmspeed.errors import UserError, nearest
from mmspeed.protocols import Task

# name of a task in configs -> "module:class"; the class is made from the config and what encodes missing data, if anything does
TASKS: dict[str, str] = {"video": "mmspeed.pipelines.tasks.video:VideoTask"}


def register(name: str, task: str, config: str) -> None:
    """Make a task known by its name in configs; `task` and `config` are "module:class". Before the first config of it is read."""
    TASKS[name], CONFIGS[name] = task, config


def make_task(config: RunConfig, maker: Any = None) -> Task:
    """The task that a config names. Raises UserError for one that is not known."""
    if config.task not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f"task: {config.task!r} is not known{nearest(config.task, list(TASKS))} (known: {known})")
    module, _, name = TASKS[config.task].partition(":")
    task: Task = getattr(import_module(module), name)(config, maker)
    return task
