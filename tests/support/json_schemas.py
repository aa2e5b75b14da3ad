"""The mistakes of a value by a JSON schema, for the words of JSON schema that pydantic writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_NOTES = {"title", "description", "default", "discriminator", "$defs", "$schema"}
_NUMBERS: dict[str, Any] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def mistakes(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Every mistake of a value, with its path. Raises NotImplementedError for a word of the schema that is not known here."""
    return list(_mistakes(value, schema, schema, ""))


def _mistakes(value: Any, part: Any, root: Mapping[str, Any], path: str) -> Iterator[str]:
    for word, rule in part.items():
        if word in _NOTES or word in ("additionalProperties", "required", "prefixItems"):
            continue
        if word == "$ref":
            yield from _mistakes(value, root["$defs"][rule.rsplit("/", 1)[-1]], root, path)
        elif word == "type":
            if not isinstance(value, _TYPES[rule]) or (isinstance(value, bool) and rule in ("integer", "number")):
                yield f"{path} is no {rule}"
        elif word in ("anyOf", "oneOf"):
            fitting = sum(not list(_mistakes(value, choice, root, path)) for choice in rule)
            if fitting == 0 or (word == "oneOf" and fitting > 1):
                yield f"{path} fits {fitting} of {len(rule)}"
        elif word == "enum" or word == "const":
            if value not in (rule if word == "enum" else [rule]):
                yield f"{path} is {value!r}"
        elif word == "properties":
            for key in value if isinstance(value, dict) else ():
                if key in rule:
                    yield from _mistakes(value[key], rule[key], root, f"{path}.{key}")
        elif word == "propertyNames":
            for key in value if isinstance(value, dict) else ():
                yield from _mistakes(key, rule, root, f"{path}.{key}")
        elif word == "items":
            for number, item in enumerate(value if isinstance(value, list) else ()):
                yield from _mistakes(item, rule, root, f"{path}.{number}")
        elif word in ("minItems", "maxItems", "minLength"):
            if isinstance(value, list | str) and (len(value) > rule if word == "maxItems" else len(value) < rule):
                yield f"{path} has {len(value)} items"
        elif word == "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield f"{path} is {value!r}"
        elif word in _NUMBERS:
            if isinstance(value, int | float) and not _NUMBERS[word](value, rule):
                yield f"{path} is {value}"
        else:
            raise NotImplementedError(word)
    if isinstance(value, dict):
        yield from (f"{path}.{key} is missing" for key in part.get("required", ()) if key not in value)
        others = [key for key in value if key not in part.get("properties", {})]
        allowed = part.get("additionalProperties", True)
        if isinstance(allowed, dict):
            for key in others:
                yield from _mistakes(value[key], allowed, root, f"{path}.{key}")
        elif not allowed:
            yield from (f"{path}.{key} is unknown" for key in others)
    if isinstance(value, list):
        for number, (item, rule) in enumerate(zip(value, part.get("prefixItems", ()), strict=False)):
            yield from _mistakes(item, rule, root, f"{path}.{number}")
