"""Runs of methods on every domain: characters, decoders, SoraDiT, a tiny Wan and its two experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmspeed import rng
from mmspeed.config import RunConfig, make_config
from mmspeed.device import Device
from mmspeed.log import read_metrics
from mmspeed.mesh import process_group
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.run.assembly import Assembly, assemble, place
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.texts.preparation import TextPreparation
from mmspeed.protocols import Method, StepData
from tests.support.character_runs import character_config
from tests.support.experts import experts_config
from tests.support.runs import small_config
from tests.support.tiny_repositories import save_wan_experts

SIX = (
    "train.steps=6",
    "train.batch_size=4",
    "train.micro_batch_size=2",
    "train.warmup_steps=0",
    "train.eps=1e-4",
    "validate.every=6",
)
LINES = ["the rabbit runs over a meadow", "two birds sing", "the earth turns slowly in the dark of the night", "a"]


def language_config(folder: Path, shape: str, *overrides: str) -> RunConfig:
    """A run of a tiny decoder on packs of several documents, of which some end in padding."""
    tree: dict[str, Any] = {
        "task": "language",
        "name": "small",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.1},
        "model": {"shape": shape, "num_nextn_predict_layers": 0},
        "sequence_length": 95,
        "train": {"lr": 1e-3, "log_every": 1},
        "validate": {"samples": 4, "report": False},
        "checkpoint": {"every": 100, "keep_best": False},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, overrides, origin="test")


def config_of(kind: str, folder: Path, *overrides: str) -> RunConfig:
    """The config of a kind of `KINDS`: six steps of four samples, two at a time."""
    return KINDS[kind](folder, *SIX, f"output={folder / kind}", *overrides)


KINDS: Mapping[str, Any] = {
    "listed": lambda folder, *overrides: character_config(folder / "listed", *overrides),
    "qwen3": lambda folder, *overrides: language_config(folder / "texts", "tiny-qwen3-8b", *overrides),
    "deepseek": lambda folder, *overrides: language_config(
        folder / "texts", "tiny-deepseek-v3", "model.balance=sequence", *overrides
    ),
    "soradit": lambda folder, *overrides: small_config(folder / "clips", *overrides),
    "wan": lambda folder, *overrides: experts_config(folder / "wan", *overrides, expert="high"),
    "experts": lambda folder, *overrides: experts_config(folder / "wan", *overrides),
}


def prepare(folder: Path, kinds: set[str]) -> None:
    """Make the caches of kinds."""
    if kinds & {"qwen3", "deepseek"}:
        (folder / "texts").mkdir()
        lines = [f'{{"text": "{line} {number}"}}\n' for number in range(12) for line in LINES]
        (folder / "texts" / "a.jsonl").write_text("".join(lines))
        TextPreparation(language_config(folder / "texts", "tiny-qwen3-8b")).build()
    if "soradit" in kinds:
        CacheBuilder(small_config(folder / "clips")).run()
    if kinds & {"wan", "experts"}:
        (folder / "wan").mkdir()
        save_wan_experts(folder / "wan" / "base")
        CacheBuilder(experts_config(folder / "wan", expert="high")).run()


def task_of(config: RunConfig, method: Method) -> Task:
    """The domain of a config, by a method."""
    return Task(make_task(config).domain, method)


def train(config: RunConfig, method: Method) -> list[dict[str, Any]]:
    """Train on however many ranks call this; the rows of the steps."""
    TrainPipeline(config, task=task_of(config, method)).run()
    return [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]


@contextmanager
def assembled(config: RunConfig, method: Method) -> Iterator[tuple[Task, Assembly, StepData]]:
    """The task, the models and the first step of a run on one process, as a trainer makes them."""
    task, device = task_of(config, method), Device("cpu", 0)
    with process_group(device):
        placement = place(config, device)
        where = placement.at(device, config.run_dir)
        task.domain.open(where)
        data = task.data(where)
        parts = assemble(config, task, task.build(), placement, device)
        with closing(data.steps(0, 1)) as steps:
            yield task, parts, next(steps)
        data.close()


def moved(model: nn.Module, spread: float = 0.02) -> nn.Module:
    """The model with other weights near its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(spread * rng.normal(tuple(parameter.shape), 1, "moved", name))
    return model
