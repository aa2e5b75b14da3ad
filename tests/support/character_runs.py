"""Runs of the character task."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

from mmspeed.cli.app import run
from mmspeed.config import make_config
from mmspeed.device import Device
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.listed.domain import ListedSample
from mmspeed.pipelines.tasks import register
from mmspeed.protocols import RunPlace
from tests.support.characters import CharacterConfig, CharacterDomain
from tests.support.runs import SAVED_ONCE

ALONE = RunPlace(Device("cpu", 0))


def register_characters() -> None:
    """All that makes the task known beside its own file."""
    register("characters", "tests.support.characters:CharacterDomain", "tests.support.characters:CharacterConfig")


def character_tree(folder: Path) -> dict[str, Any]:
    """Six steps; an epoch has three of six packs and, at any place among them, one of two."""
    return {
        "task": "characters",
        "name": "small",
        "output": str(folder / "runs"),
        "train": {"steps": 6, "batch_size": 6, "lr": 1e-3, "warmup_steps": 2, "log_every": 1},
        "validate": {"every": 3, "samples": 4, "report": False},
        "checkpoint": {**SAVED_ONCE},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }


def character_config(folder: Path, *overrides: str) -> CharacterConfig:
    """`character_tree`, checked, with overrides."""
    register_characters()
    return cast(CharacterConfig, make_config(character_tree(folder), overrides, origin="test"))


def train_characters(folder: str, overrides: tuple[str, ...] = ()) -> None:
    """Train, on however many ranks call this."""
    TrainPipeline(character_config(Path(folder), *overrides)).run()


def command_characters(*arguments: str) -> None:
    """Register the task by its names alone, and run a command line; ends the process."""
    register_characters()
    sys.exit(run(list(arguments)))


def rows(config: CharacterConfig, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of a kind of a run's metrics."""
    return [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def step_packs(task: CharacterDomain, step: int) -> list[ListedSample]:
    """The packs of a step over all ranks."""
    return [draw.sample for draw in task.data(ALONE).sampler.draws(step)]


def losses(config: CharacterConfig) -> list[float]:
    """The losses of a run's steps, in order."""
    return [row["loss"] for row in rows(config)]
