"""The table of tasks. Installed packages declare more, as entry points of the group `mmspeed.tasks`."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError, nearest

from .schema import RunConfig
from .yaml_text import parse_yaml

GROUP = "mmspeed.tasks"  # of entry points; an entry's name is the task's, and its value the task's class
OURS = "mmspeed"


@dataclass(frozen=True)
class TaskEntry:
    """The classes of a task as "module:class", so that each is imported only when it is needed.

    Args:
        task: the class that is constructed from the config and, optionally, an encoder that completes missing data.
        config: the class derived from `RunConfig`; None: the attribute `config_class` of the task's class.
        preparation: the class that prepares data before training; None: the attribute `preparation_class` of the task's class, if any.
        origin: the package that declares the task, for messages.
    """

    task: str
    config: str | None = None
    preparation: str | None = None
    origin: str = OURS

    def to_json(self) -> dict[str, Any]:
        """The entry for another process: `TaskEntry(**json)`."""
        return asdict(self)


# name in configs -> classes; add a line for a task of this repository
TASKS: dict[str, TaskEntry] = {
    "video": TaskEntry(
        "mmspeed.pipelines.domains.video.domain:VideoDomain",
        config="mmspeed.config.schema:Config",
        preparation="mmspeed.preprocess.preparation:VideoPreparation",
    ),
    "language": TaskEntry(
        "mmspeed.pipelines.domains.language.domain:LanguageDomain",
        config="mmspeed.config.language:LanguageConfig",
        preparation="mmspeed.preprocess.texts.preparation:TextPreparation",
    ),
}


def known_tasks() -> list[str]:
    """The names of all tasks: the table's, then those of installed packages."""
    return list(dict.fromkeys([*TASKS, *sorted(entry.name for entry in installed(GROUP))]))


def task_entry(task: Any, origin: str = "config") -> TaskEntry:
    """The classes of a task, by its name; `origin` is the file or source of the name, for messages.

    Raises UserError for an unknown name, and for a name that several packages declare, or a package and mmspeed itself.
    """
    declared = [entry for entry in installed(GROUP) if entry.name == task]
    table_entry = TASKS.get(task) if isinstance(task, str) else None
    if table_entry is not None and (table_entry.origin != OURS or not declared):
        return table_entry
    owners = [*([OURS + " itself"] if table_entry is not None else []), *map(_package, declared)]
    if len(owners) > 1:
        raise UserError(
            f"{origin}: the task {task} is declared by {' and by '.join(owners)}; uninstall all but one, or rename theirs"
        )
    if not owners:
        known = known_tasks()
        hint = nearest(task, known) if isinstance(task, str) else ""
        raise UserError(f"{origin}: task {task!r} is not known{hint} (known: {', '.join(known)})")
    return TaskEntry(declared[0].value, origin=f"the installed package {owners[0]}")


def recorded_task(file: Path) -> str:
    """The name of the task of a run's config, as it was written; the rest is neither read nor checked. Raises OSError, ValueError."""
    return str(parse_yaml(file.read_text(encoding="utf-8")).get("task", "video"))


def task_class(task: Any, origin: str = "config") -> type[Any]:
    """The class of a task. Raises UserError like `task_entry`, and if the class cannot be imported."""
    entry = task_entry(task, origin)
    return _load(entry.task, task, entry)


def config_class(task: Any, origin: str = "config") -> type[RunConfig]:
    """The config class of a task. Raises UserError like `task_class`, and if the task's class has none."""
    entry = task_entry(task, origin)
    if entry.config is not None:
        return _load(entry.config, task, entry)
    kind = _load(entry.task, task, entry)
    candidate = getattr(kind, "config_class", None)
    if not (isinstance(candidate, type) and issubclass(candidate, RunConfig)):
        raise UserError(
            f"the task {task} of {entry.origin} has no config: {entry.task} needs the class attribute config_class, "
            "a class derived from mmspeed.config.RunConfig"
        )
    return candidate


def preparation_class(task: str) -> type[Any] | None:
    """The class that prepares data before a task's training; None if there is none. Raises UserError like `task_class`."""
    entry = task_entry(task)
    if entry.preparation is not None:
        return _load(entry.preparation, task, entry)
    if entry.origin == OURS or entry.config is not None:  # their entry is complete
        return None
    kind: type[Any] | None = getattr(_load(entry.task, task, entry), "preparation_class", None)
    return kind


def prepared_tasks() -> list[str]:
    """The tasks of the table that have a preparation."""
    return [name for name, entry in TASKS.items() if entry.preparation is not None]


def _load(reference: str, task: str, entry: TaskEntry) -> type[Any]:
    """The class that "module:class" names. Raises UserError with the task's owner and the cause."""
    try:
        kind = referred(reference)
    except Exception as error:  # importing a package's module may raise anything
        if entry.origin == OURS:
            raise
        cause = str(error).strip().split("\n")[0]
        raise UserError(
            f"the task {task} is of {entry.origin}, and {reference!r} cannot be imported: {type(error).__name__}: {cause}"
        ) from error
    if not isinstance(kind, type):
        raise UserError(f"the task {task} is of {entry.origin}, and {reference!r} is not a class")
    return kind


def referred(reference: str) -> Any:
    """Import the object that "module:name" names. Raises what the import raises, and ValueError for another form."""
    module, sign, name = (part.strip() for part in reference.partition(":"))
    if not (module and sign and name):
        raise ValueError("write module:class")
    return functools.reduce(getattr, name.split("."), import_module(module))


def _package(entry: EntryPoint) -> str:
    """The name and version of the package that an entry point belongs to."""
    package = entry.dist
    return "(of no package)" if package is None else f"{package.metadata['Name']} {package.version}"


def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group that installed packages declare."""
    return _declared(group, tuple(sys.path))


@functools.lru_cache(maxsize=8)  # configs are read often, and the metadata of all packages takes tens of milliseconds
def _declared(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
