"""The values of a tree of settings by their dotted keys, as they are written on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """The leaves of a tree of JSON by dotted key, as JSON text; an empty mapping or list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(isinstance(one, Mapping) for one in tree):
        items = [(str(place), value) for place, value in enumerate(tree)]
    else:
        return {prefix: json.dumps(tree, sort_keys=True)}
    leaves: dict[str, str] = {}
    for key, value in items:
        leaves |= flat(value, f"{prefix}.{key}" if prefix else key)
    return leaves
