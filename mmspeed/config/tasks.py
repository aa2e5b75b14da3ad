"""Which config each task has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmspeed.errors import UserError, nearest

from .schema import RunConfig

CONFIGS: dict[str, str] = {"video": "mmspeed.config.schema:Config"}  # "module:class"


def config_class(task: Any, origin: str = "config") -> type[RunConfig]:
    """The config of a task. Raises UserError for one that is not known."""
    if not isinstance(task, str) or task not in CONFIGS:
        known = ", ".join(CONFIGS)
        hint = nearest(task, list(CONFIGS)) if isinstance(task, str) else ""
        raise UserError(f"{origin}: task {task!r} is not known{hint} (known: {known})")
    module, _, name = CONFIGS[task].partition(":")
    kind: type[RunConfig] = getattr(import_module(module), name)
    return kind
