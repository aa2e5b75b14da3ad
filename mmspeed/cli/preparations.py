"""What comes before the training of a config's task, for the commands that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspeed.config.tasks import preparation_class, prepared_tasks
from mmspeed.errors import UserError

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.protocols.preparation import Preparation


def preparation(config: RunConfig) -> Preparation | None:
    """The preparation of a config's task; None where its data need none."""
    kind = preparation_class(config.task)
    return None if kind is None else kind(config)


def needed_preparation(config: RunConfig, command: str) -> Preparation:
    """As `preparation`. Raises UserError, which names the command, for a task that has none."""
    found = preparation(config)
    if found is None:
        raise not_there(config.task, command)
    return found


def not_there(task: str, command: str) -> UserError:
    """The error of a command that does not serve a task."""
    return UserError(f"`mmspeed {command}` is not there for the task {task} (it is for: {', '.join(prepared_tasks())})")


def maker_of(config: RunConfig) -> Any:
    """What completes a config's data in the first epoch; None where nothing does."""
    found = preparation(config)
    return None if found is None else found.maker()
