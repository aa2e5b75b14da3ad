"""Generate `docs/config.md` and the JSON schema for editors from the fields: `python -m mmspeed.config.docs`; `--check` compares.

The files of `mmspeed init` use the same functions to show a field's type and default.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .json_schema import SHIPPED, schema_text
from .language import LanguageConfig
from .load import _models_of, sections
from .schema import Config

LANGUAGE = "task: language "  # before the titles of its sections
REQUIRED = object()  # the default of a field that has none
TARGET = Path(__file__).resolve().parents[2] / "docs" / "config.md"

HEADER = """\
# Configuration

<!-- Made from the fields in mmspeed/config/ by `python -m mmspeed.config.docs`; edit the fields there, not this file. -->

A run is described by one YAML file. `mmspeed init my-run --full` writes one with every key in it, and
`mmspeed train my-run.yaml --print-config` shows the whole resolved configuration. Any key can be overridden behind
the file's name: `mmspeed train my-run.yaml train.lr=2e-4 data.buckets.0.frames=33`. Unknown keys are errors. Relative
paths are taken from the folder of the file. `mmspeed/assets/config.schema.json` is the JSON schema for editors, which
`mmspeed.config.json_schema()` returns.

`[]` marks a list, `(name)` the choice of `kind` that a key belongs to. Keys without a default must be given.
"""


def section_options(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections a field may hold: none for a plain value, several for a choice of `kind`."""
    return _models_of(field.annotation)


def is_list(field: FieldInfo) -> bool:
    """True if a field holds a list of any length, of sections or of values."""
    args = typing.get_args(field.annotation)
    return typing.get_origin(field.annotation) is tuple and len(args) == 2 and args[1] is Ellipsis


def kind_of(model: type[BaseModel]) -> str:
    """The value of `kind` that selects this section."""
    return str(typing.get_args(model.model_fields["kind"].annotation)[0])


def default_of(field: FieldInfo) -> Any:
    """A field's default in plain JSON types, or `REQUIRED`."""
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return REQUIRED
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return list(value) if isinstance(value, tuple) else value


def show_value(value: Any) -> str:
    """A plain value in YAML's flow style (JSON); words are quoted only where YAML needs it."""
    if isinstance(value, float):
        return _show_float(value)
    if isinstance(value, str):
        return value if value and _plain(value) else _quoted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show_value(item) for item in value) + "]"
    return json.dumps(value)


def _show_float(value: float) -> str:
    text = repr(value)
    # YAML 1.1 reads 1e-08 as a string: its floats have a point
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=sys.maxsize).strip()


def _plain(text: str) -> bool:
    """True if YAML reads the unquoted text as this same string."""
    if any(sign in text for sign in "[]{},") or text != text.strip() or text.splitlines() != [text]:
        return False  # YAML's line breaks, such as U+2028, are among those of Python
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def show_type(annotation: Any) -> str:
    """A field's type in words: `whole number`, `true or false`, `auto, cpu`, `list of text`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return show_type(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        parts = [show_type(arg) for arg in args if arg is not type(None)]
        return " or ".join(dict.fromkeys(parts)) + (" or null" if type(None) in args else "")
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"list of {show_type(args[0])}"
        return f"{len(args)} x {show_type(args[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def show_limits(field: FieldInfo) -> str:
    """The bounds of a number, such as ` > 0, <= 240`; empty when there are none."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [(sign, getattr(rule, name, None)) for rule in field.metadata for name, sign in signs.items()]
    text = ", ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
    return f" {text}" if text else ""


def show_default(field: FieldInfo) -> str:
    """A field's default for a table; a dash when the field must be given, nothing for sections."""
    if default_of(field) is REQUIRED:
        return "—"
    return "" if section_options(field) else f"`{show_value(default_of(field))}`"


def generate() -> str:
    """The text of `docs/config.md`."""
    parts = [HEADER]
    parts.append(_table("Top level", "", "The sections, and the keys outside them.", dict(sections(Config))))
    for name, field in sections(Config):
        parts += _sections(field.alias or name, field)
    shared = dict(sections(Config))
    own = {
        name: field
        for name, field in sections(LanguageConfig)
        if name not in shared or field.annotation != shared[name].annotation
    }
    parts.append(_table(LANGUAGE.rstrip(), "", "The keys of a language model's run that are not those above.", own))
    for name, field in own.items():
        parts += _sections(field.alias or name, field, LANGUAGE)
    return "\n".join(parts)


def _sections(path: str, field: FieldInfo, task: str = "") -> list[str]:
    """The tables of the sections that a field may hold, and of those inside them. `task`: words before their titles."""
    options = section_options(field)
    tables = []
    for option in options:
        choice = f"({kind_of(option)})" if len(options) > 1 else ""
        prefix = f"{path}{'[]' if is_list(field) else ''}{choice}"
        title = path if not choice else f"{path}, kind: {kind_of(option)}"
        intro = " ".join((option.__doc__ or "").split())
        tables.append(_table(f"{task}{title}", f"{prefix}.", intro, option.model_fields))
        for name, inner in option.model_fields.items():
            tables += _sections(f"{prefix}.{inner.alias or name}", inner, task)
    return tables


def _table(title: str, prefix: str, intro: str, fields: dict[str, FieldInfo]) -> str:
    rows = [f"## {title}\n\n{intro}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        kind = show_type(field.annotation).removesuffix(" or null") + show_limits(field)
        kind += " or null" if show_type(field.annotation).endswith(" or null") else ""
        cells = (
            "list of sections" if is_list(field) and section_options(field) else kind,
            show_default(field),
            field.description or "",
        )
        escaped = [cell.replace("|", "\\|") for cell in cells]
        rows.append(f"| `{prefix}{field.alias or name}` | " + " | ".join(escaped) + " |")
    return "\n".join(rows) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write or compare the files; the exit code is 1 when `--check` finds one out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m mmspeed.config.docs", description="Write docs/config.md and the JSON schema for editors."
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 when a file is out of date")
    parser.add_argument("--output", type=Path, default=TARGET, help="page to write or compare")
    parser.add_argument("--schema", type=Path, default=SHIPPED, help="JSON schema to write or compare")
    args = parser.parse_args(argv)
    stale = []
    for path, text in ((args.output, generate()), (args.schema, schema_text())):
        if not args.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
    if stale:
        print(f"{' and '.join(stale)} out of date: run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
