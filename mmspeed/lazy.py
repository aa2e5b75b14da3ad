"""Names of a package whose modules are loaded on first use."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def first_use(package: str, homes: Mapping[str, str], name: str) -> Any:
    """`name` of the module of `package` that `homes` gives for it. Raises AttributeError for another name.

    Modules make hardly any garbage, and the search for it is an eighth of the time that torch takes to load.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    searched = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(f"{package}.{homes[name]}"), name)
    finally:
        if searched:
            gc.enable()
