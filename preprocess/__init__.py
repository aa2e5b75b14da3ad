"""From files to the dataset cache. Names are loaded on first use, so that decoder processes start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspeed.preprocess.build import CacheBuilder
    from mmspeed.preprocess.checking import check
    from mmspeed.preprocess.online import OnlineBuilder
    from mmspeed.preprocess.report import BuildReport

__all__ = ["BuildReport", "CacheBuilder", "OnlineBuilder", "check"]

_HOME = {"CacheBuilder": "build", "BuildReport": "report", "OnlineBuilder": "online", "check": "checking"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
