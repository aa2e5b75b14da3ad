"""The JSON schema of a config, by which editors complete keys, show their sentences and mark mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from .load import sections
from .published import DEFAULT_KINDS
from .schema import Config, RunConfig

SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "config.schema.json"  # of the video task
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: type[RunConfig] = Config) -> dict[str, Any]:
    """The JSON schema of a task's configs, keys in reading order. Like the loader, it lets a section leave out its usual `kind`."""
    schema = kind.model_json_schema(by_alias=True)
    properties = schema.pop("properties")
    definitions = schema.pop("$defs", {})
    for section, usual in DEFAULT_KINDS.items():
        choices = properties.get(section, {}).get("discriminator", {}).get("mapping", {})
        if usual in choices:
            chosen = definitions[choices[usual].rsplit("/", 1)[-1]]
            chosen["required"] = [key for key in chosen.get("required", ()) if key != "kind"]
    return {
        "$schema": DIALECT,
        **schema,
        "title": "mmspeed config",
        "properties": {key: properties[key] for key, _ in sections(kind)},
        "$defs": definitions,
    }


def schema_text() -> str:
    """The text of the schema that ships with the package."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def editor_line(kind: type[BaseModel]) -> str:
    """The first line of a config, by which editors find the shipped schema; empty for tasks that have no shipped one."""
    return f"# yaml-language-server: $schema={SHIPPED.as_uri()}" if kind is Config else ""
