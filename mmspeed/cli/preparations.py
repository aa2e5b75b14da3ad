"""The table of what comes before training, by task."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmspeed.errors import UserError

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.protocols.preparation import Preparation

# name of a task in configs -> "module:class"; a task whose data need no preparation is not in it
PREPARATIONS: dict[str, str] = {"video": "mmspeed.preprocess.preparation:VideoPreparation"}


def preparation_class(task: str, command: str) -> type[Preparation]:
    """The preparation of a task. Raises UserError, which names the command, for a task that has none."""
    if task not in PREPARATIONS:
        known = ", ".join(PREPARATIONS)
        raise UserError(f"`mmspeed {command}` is not there for the task {task} (it is for: {known})")
    module, _, name = PREPARATIONS[task].partition(":")
    kind: type[Preparation] = getattr(import_module(module), name)
    return kind


def preparation(config: RunConfig, command: str) -> Preparation:
    """The preparation of a config's task. Raises UserError as `preparation_class`."""
    return preparation_class(config.task, command)(config)


def maker_of(config: RunConfig) -> Any:
    """What completes a config's data in the first epoch; None where nothing does."""
    return preparation(config, "train").maker() if config.task in PREPARATIONS else None
