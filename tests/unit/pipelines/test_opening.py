"""The lines of a run before its first step: where it computes, what it trains on, and what has changed since it was saved."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.tasks.video import VideoTask
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache


def opening(config: Config, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a run up to its first row of losses."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "mmspeed"):
        TrainPipeline(config, task=VideoTask(config, build=build_toy)).run()
    lines = [record.getMessage() for record in caplog.records]
    return lines[: next(number for number, line in enumerate(lines) if "loss" in line)]


def test_a_run_says_what_it_will_do_and_a_resumed_one_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("train.steps=2", "train.log_every=1", "checkpoint.every=2", "validate.every=100")
    config = toy_config(tmp_path, *settings)
    write_toy_cache(config)
    lines = opening(config, caplog)
    text = "\n".join(lines)
    (device,) = [line for line in lines if line.startswith("device: ")]
    assert device.startswith("device: cpu (") and device.endswith("), float32, one process")
    (data,) = [line for line in lines if line.startswith("data: ")]
    assert " samples, " in data and " steps an epoch; 2 steps are " in data
    (model,) = [line for line in lines if line.startswith("model: ")]
    assert model.endswith(" parameters") and f"run folder: {config.run_dir}" in lines
    assert "changed since" not in text
    more = toy_config(tmp_path, "train.steps=4", "train.lr=0.5", *settings[1:])
    resumed = [line for line in opening(more, caplog) if "changed since it was saved" in line]
    assert resumed == ["going on from step 2; changed since it was saved: train.steps, train.lr"]
