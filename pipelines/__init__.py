"""The Python API: training and sampling pipelines, composed of the floors below. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspeed.pipelines.media import Video
    from mmspeed.pipelines.outcome import TrainResult
    from mmspeed.pipelines.report import write_report
    from mmspeed.pipelines.text_to_video import TextToVideo
    from mmspeed.pipelines.train import TrainPipeline

__all__ = ["TextToVideo", "TrainPipeline", "TrainResult", "Video", "write_report"]

_HOME = {
    "TextToVideo": "text_to_video",
    "TrainPipeline": "train",
    "TrainResult": "outcome",
    "Video": "media",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
