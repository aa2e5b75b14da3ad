"""The order in which a run's callbacks are called around each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspeed.loop.callbacks import Callback
from mmspeed.pipelines import TrainPipeline
from tests.support.character_runs import character_config
from tests.support.distillation import DistillationTask


def test_the_order_of_a_runs_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times come first, the rate before what reads it, averages after the step, telemetry and events near the end, signals last."""
    callbacks: list[Callback] = []
    own = TrainPipeline._callbacks

    def noted(self: TrainPipeline, *args: Any) -> list[Callback]:
        callbacks.extend(own(self, *args))
        return callbacks

    monkeypatch.setattr(TrainPipeline, "_callbacks", noted)
    config = character_config(tmp_path, "train.steps=1", "train.ema_decay=0.9")
    TrainPipeline(config, task=DistillationTask(config)).run()
    order = [
        "RankTimes",
        "LearningRate",
        "Averages",
        "Averages",
        "OomAdvisor",
        "StepMeans",
        "StepCounts",
        "TelemetryCallback",
        "Events",
        "Signals",
    ]
    assert [type(callback).__name__ for callback in callbacks] == order
