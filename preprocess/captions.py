"""Caption files and caption fields, made clean."""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def clean_caption(text: str, max_chars: int) -> tuple[str, bool]:
    """The caption without control characters and with single spaces, and whether it had to be cut to `max_chars`."""
    text = " ".join(_SURROGATE.sub("\ufffd", _CONTROL.sub("", text)).split())
    return text[:max_chars].rstrip(), len(text) > max_chars


def captions_in(name: str, data: bytes, key: str) -> list[str]:
    """The captions of a caption file: a JSON's strings, or the whole text. A JSON without captions gives none."""
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = data.decode("utf-16" if wide else "utf-8-sig", "replace")
    if not name.lower().endswith(".json"):
        return [text]
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(tree, dict):
        tree = tree.get(key, tree.get("caption"))
    try:
        return strings(tree)
    except ValueError:
        return []


def strings(value: Any) -> list[str]:
    """A caption field: nothing, a string, or a list of strings. Raises ValueError for anything else."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"the caption is a {type(value).__name__}, not a string or a list of strings")
