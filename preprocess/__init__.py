"""Preprocessing of media files into the dataset cache. Names are loaded on first use, so that decoder processes start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspeed.lazy import first_use

if TYPE_CHECKING:
    from mmspeed.preprocess.build.offline import CacheBuilder
    from mmspeed.preprocess.build.online import OnlineBuilder
    from mmspeed.preprocess.records.build_report import BuildReport
    from mmspeed.preprocess.report.check import check
    from mmspeed.preprocess.report.starting import DataFit, fit_data
    from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder

__all__ = ["BuildReport", "CacheBuilder", "DataFit", "OnlineBuilder", "TextCacheBuilder", "check", "fit_data"]

_HOME = {
    "CacheBuilder": "build.offline",
    "BuildReport": "records.build_report",
    "OnlineBuilder": "build.online",
    "check": "report.check",
    "DataFit": "report.starting",
    "fit_data": "report.starting",
    "TextCacheBuilder": "texts.cache_builder",
}


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOME, name)
