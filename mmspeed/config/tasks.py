"""The table of tasks: one line each. Installed packages declare more of them, as entry points of the group `mmspeed.tasks`."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mmspeed.errors import UserError, nearest

from .schema import RunConfig

GROUP = "mmspeed.tasks"  # of entry points; an entry's name is the task's, and its value the task's class
OURS = "mmspeed"


@dataclass(frozen=True)
class TaskEntry:
    """The classes of a task as "module:class", so that nothing is imported before it is asked for.

    Args:
        task: made from the config, and what completes missing data, if anything does.
        config: derived from `RunConfig`; None: the attribute `config_class` of the task's class.
        preparation: what comes before training; None: the attribute `preparation_class` of the task's class, if it has one.
        origin: who made it known, for messages.
    """

    task: str
    config: str | None = None
    preparation: str | None = None
    origin: str = OURS

    def to_json(self) -> dict[str, Any]:
        """The entry for another process: `TaskEntry(**json)`."""
        return asdict(self)


# name in configs -> its classes: a task of this repository is one line here
TASKS: dict[str, TaskEntry] = {
    "video": TaskEntry(
        "mmspeed.pipelines.tasks.video:VideoTask",
        config="mmspeed.config.schema:Config",
        preparation="mmspeed.preprocess.preparation:VideoPreparation",
    ),
}


def known_tasks() -> list[str]:
    """The names of all tasks: those of the table, then those of installed packages."""
    return list(dict.fromkeys([*TASKS, *sorted(entry.name for entry in _installed(tuple(sys.path)))]))


def task_entry(task: Any, origin: str = "config") -> TaskEntry:
    """The classes of a task, by its name. `origin`: where the name stands, for messages.

    Raises UserError for one that is not known, and for a name that several packages give, or one beside mmspeed itself.
    """
    declared = [entry for entry in _installed(tuple(sys.path)) if entry.name == task]
    own = TASKS.get(task) if isinstance(task, str) else None
    if own is not None and (own.origin != OURS or not declared):
        return own
    owners = [*([OURS + " itself"] if own is not None else []), *map(_package, declared)]
    if len(owners) > 1:
        raise UserError(
            f"{origin}: the task {task} is declared by {' and by '.join(owners)}; uninstall all but one, or rename theirs"
        )
    if not owners:
        known = known_tasks()
        hint = nearest(task, known) if isinstance(task, str) else ""
        raise UserError(f"{origin}: task {task!r} is not known{hint} (known: {', '.join(known)})")
    return TaskEntry(declared[0].value, origin=f"the installed package {owners[0]}")


def task_class(task: Any, origin: str = "config") -> type[Any]:
    """The class of a task. Raises UserError as `task_entry`, and for one that cannot be imported."""
    entry = task_entry(task, origin)
    return _load(entry.task, task, entry)


def config_class(task: Any, origin: str = "config") -> type[RunConfig]:
    """The config of a task. Raises UserError as `task_class`, and where the task's class names none."""
    entry = task_entry(task, origin)
    if entry.config is not None:
        return _load(entry.config, task, entry)
    kind = _load(entry.task, task, entry)
    found = getattr(kind, "config_class", None)
    if not (isinstance(found, type) and issubclass(found, RunConfig)):
        raise UserError(
            f"the task {task} of {entry.origin} has no config: {entry.task} needs the class attribute config_class, "
            "a class derived from mmspeed.config.RunConfig"
        )
    return found


def preparation_class(task: str) -> type[Any] | None:
    """What comes before a task's training; None where nothing does. Raises UserError as `task_class`."""
    entry = task_entry(task)
    if entry.preparation is not None:
        return _load(entry.preparation, task, entry)
    if entry.origin == OURS or entry.config is not None:  # of these the table says everything
        return None
    found: type[Any] | None = getattr(_load(entry.task, task, entry), "preparation_class", None)
    return found


def prepared_tasks() -> list[str]:
    """The tasks of the table that something comes before."""
    return [name for name, entry in TASKS.items() if entry.preparation is not None]


def _load(reference: str, task: str, entry: TaskEntry) -> type[Any]:
    """The class that "module:class" names. Raises UserError that says whose task it is, with the cause."""
    try:
        kind = referred(reference)
    except Exception as error:  # whatever a package's module does when it is imported
        if entry.origin == OURS:
            raise
        cause = str(error).strip().split("\n")[0]
        raise UserError(
            f"the task {task} is of {entry.origin}, and {reference!r} cannot be imported: {type(error).__name__}: {cause}"
        ) from error
    if not isinstance(kind, type):
        raise UserError(f"the task {task} is of {entry.origin}, and {reference!r} is no class")
    return kind


def referred(reference: str) -> Any:
    """What "module:name" names, imported. Raises what the import does, and ValueError for other words."""
    module, sign, name = (part.strip() for part in reference.partition(":"))
    if not (module and sign and name):
        raise ValueError("write module:class")
    return functools.reduce(getattr, name.split("."), import_module(module))


def _package(entry: EntryPoint) -> str:
    """The name and version of the package that an entry point is of."""
    package = entry.dist
    return "(of no package)" if package is None else f"{package.metadata['Name']} {package.version}"


@functools.lru_cache(maxsize=4)  # configs are read often, and the metadata of all packages takes tens of milliseconds
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The tasks that packages in the folders of `path` (sys.path) declare."""
    return tuple(entry_points(group=GROUP))
