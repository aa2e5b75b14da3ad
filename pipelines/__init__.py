"""The Python API: training and sampling pipelines. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspeed.lazy import first_use

if TYPE_CHECKING:
    from mmspeed.pipelines.inference.language import LanguageModel
    from mmspeed.pipelines.inference.media import Video
    from mmspeed.pipelines.inference.text_to_video import TextToVideo
    from mmspeed.pipelines.report.run_page import write_report
    from mmspeed.pipelines.training.events import TrainCallback
    from mmspeed.pipelines.training.run_state import TrainResult
    from mmspeed.pipelines.training.trainer import TrainPipeline

__all__ = ["LanguageModel", "TextToVideo", "TrainCallback", "TrainPipeline", "TrainResult", "Video", "write_report"]

_HOME = {
    "LanguageModel": "inference.language",
    "TextToVideo": "inference.text_to_video",
    "TrainCallback": "training.events",
    "TrainPipeline": "training.trainer",
    "TrainResult": "training.run_state",
    "Video": "inference.media",
    "write_report": "report.run_page",
}


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOME, name)
