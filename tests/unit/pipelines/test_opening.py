"""The lines of a run before its first step: where it computes, what it trains on, and what has changed since it was saved."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import Config
from mmspeed.config.training import TrainConfig
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.training.opening import rate_line
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache


def opening(config: Config, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a run up to its first row of losses."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "mmspeed"):
        TrainPipeline(config, task=VideoDomain(config, build=build_toy)).run()
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
    shutil.rmtree(config.run_dir / "checkpoints" / "step-00000004")
    assert "going on from step 2" in opening(more, caplog)


@pytest.mark.parametrize(
    ("course", "steps", "step", "said"),
    [
        ({"schedule": "cosine"}, 200, 100, "from 0 to 0.496,"),
        ({"schedule": "cosine"}, 200, 50, "from 0.508 to 0.852"),  # stopped half way
        ({"schedule": "wsd", "min_lr_ratio": 0.1}, 200, 100, "from 0.1 to 1,"),
        ({"schedule": "wsd"}, 200, 40, None),  # before it would have gone down
        ({"schedule": "cosine"}, 100, 50, None),
        ({"schedule": "cosine"}, 80, 50, None),
        ({"schedule": "constant"}, 200, 100, None),
        ({"schedule": "cosine"}, 200, 0, None),  # nothing was trained
    ],
    ids=str,
)
def test_a_rate_that_rises_again_with_more_steps_is_told(course: Any, steps: int, step: int, said: str | None) -> None:
    before = TrainConfig(steps=100, warmup_steps=0, lr=1.0, **course)
    line = rate_line(before, before.model_copy(update={"steps": steps}), step)
    assert line is None if said is None else line is not None and said in line


def test_a_finished_run_with_more_steps_says_both_rates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = (
        "train.schedule=cosine",
        "train.lr=0.25",
        "train.warmup_steps=0",
        "train.log_every=1",
        "validate.every=100",
    )
    config = toy_config(tmp_path, "train.steps=3", *settings)
    write_toy_cache(config)
    assert "learning rate" not in "".join(opening(config, caplog))
    text = "\n".join(opening(toy_config(tmp_path, "train.steps=5", *settings), caplog))
    assert "step 3: the learning rate rises from 0 to 0.0366" in text and "set train.schedule: constant" in text
