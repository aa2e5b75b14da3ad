"""The table of methods. Installed packages declare more, as entry points of the group `mmspeed.methods`: its name, and its class."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmspeed.errors import UserError, nearest

from .tasks import installed, referred
from .training import MethodConfig

# name in configs -> "module:class"; add a line for a method
METHODS: dict[str, str] = {"finetune": "mmspeed.pipelines.methods.finetune:Finetune"}


def make_method(section: MethodConfig) -> Any:
    """The method of a section. Raises UserError for an unknown one, and for options that it lacks or that have a wrong type."""
    methods = METHODS
    if section.kind not in methods:
        methods = {**{entry.name: entry.value for entry in installed("mmspeed.methods")}, **METHODS}
    if section.kind not in methods:
        raise UserError(
            f"method.kind: {section.kind!r} is not known{nearest(section.kind, list(methods))} (known: {', '.join(methods)})"
        )
    kind, options = referred(methods[section.kind]), dict(section.model_extra or {})
    known = [each.name for each in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise UserError(
                f"method.{name}: {section.kind} has no such option{nearest(name, known)} (it has {', '.join(known) or 'none'})"
            )
    try:
        return TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{'.'.join(map(str, ('method', *first['loc'])))}: {message[:1].lower() + message[1:]} (got {first['input']!r})"
        ) from None
