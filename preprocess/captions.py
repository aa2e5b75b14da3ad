"""Caption files and caption fields, made clean."""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def clean_caption(text: str, max_chars: int) -> tuple[str, bool, bool]:
    """The caption without control characters and with single spaces; whether it had to be cut to `max_chars`; and
    whether what is kept had to be repaired: lone surrogates, which is what undecodable bytes are read as, become U+FFFD.
    """
    text = " ".join(_CONTROL.sub("", text).split())
    kept = text[:max_chars].rstrip()
    clean, repairs = _SURROGATE.subn("\ufffd", kept)
    return clean, len(text) > max_chars, repairs > 0


def decode(data: bytes) -> str:
    """UTF-8, or UTF-16 behind its mark; each undecodable byte becomes a lone surrogate."""
    if data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-8-sig", "surrogateescape")
    try:
        return data.decode("utf-16")
    except UnicodeDecodeError:  # UTF-16 knows no surrogateescape
        return data.decode("utf-16", "replace").replace("\ufffd", "\udcff")


def captions_in(name: str, data: bytes, key: str) -> list[str]:
    """The captions of a caption file: a JSON's strings, or the whole text. A JSON without captions gives none."""
    text = decode(data)
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
    if is_missing(value):
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(f"the caption is a {type(value).__name__}, not a string or a list of strings")


def is_missing(value: Any) -> bool:
    """Whether a field says nothing: None, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and value != value)
