"""Toy runs with spoiled samples: caches of them, the order that they come in, and what a run records of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess.encoding import latent_stage
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache

# 24 samples, three a step: epochs of 8 steps
SPIKE = 6  # the step whose samples are spoiled
RULE = "train.divergence={{action: {}, factor: 50, steps: 1, window: 3, roll_backs: 1}}"
QUIET = ("validate.every=100", "validate.samples=0")
LONG = (*QUIET, "train.warmup_steps=0")


class Recorder(TrainCallback):
    """The sources that counted in each step, in order; nothing of a step without a sample or an update."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[str]]] = []

    def on_step(self, event: StepEvent) -> None:
        counted = event.outcome.result is not None and event.outcome.updated("model")
        self.steps.append((event.step, [item.source for item in event.outcome.data.items] if counted else []))


def train(folder: Path, *overrides: str, recorder: Recorder | None = None) -> Recorder:
    config, recorder = toy_config(folder, *LONG, *overrides), recorder or Recorder()
    TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[recorder]).run()
    return recorder


def cache_with(folder: Path, factors: Mapping[int, float], samples: int = 8) -> Path:
    """A folder with a cache in which the latents of some samples are multiplied by a factor."""
    write_toy_cache(toy_config(folder), samples, factors=factors)
    return folder


def rows(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["kind"] == kind]


def first_epoch(folder: Path) -> list[list[str]]:
    """The samples of each step of the first epoch."""
    cache_with(folder, {}, 25)
    return [sources for _, sources in train(folder, "train.steps=8").steps]


def spoiled(folder: Path, order: list[list[str]], factor: float, *steps: int) -> Path:
    """A cache in which the samples of these steps are multiplied by a factor."""
    numbers = [int(source.removesuffix(".mp4")) for step in steps for source in order[step - 1]]
    return cache_with(folder, dict.fromkeys(numbers, factor), 25)


@contextmanager
def enlarged(sources: Collection[str], factor: float = 1000.0) -> Iterator[None]:
    """Encode the clips of some sources far too large in the block, as a broken file might be."""
    encode = latent_stage.encode_latents

    def encode_enlarged(encoders: Any, trusted: Any, videos: Any) -> Any:
        results = encode(encoders, trusted, videos)
        for (clip, _), tensors in zip(videos, results, strict=True):
            tensors["mean"] *= factor if clip.source.name in sources else 1.0
        return results

    with mock.patch.object(latent_stage, "encode_latents", encode_enlarged):
        yield
