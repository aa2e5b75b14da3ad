"""The memory of a pipeline's ranks: as much for many micro-batches as for few, as planned, and within budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.config.parallel import ParallelConfig
from mmspeed.loop.pipeline import runner_of
from mmspeed.loop.runner import Runner
from mmspeed.memory.planning.peak import added_on_cpu, peak_bytes
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME
from mmspeed.pipelines.tuning.memory_stages import stage_of
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch
from tests.ranks.test_expert_states import config, home, losses, train
from tests.ranks.test_memory_choice import opened, with_experts
from tests.ranks.test_pipelines import MODELS
from tests.support.added_model import Meshes
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_memory_choice import CPU, config_of, task_of

__all__ = ["home"]  # a fixture

PIPELINES = [ParallelConfig(pp=2), ParallelConfig(pp=2, virtual=2)]


@dataclass(frozen=True)
class Read:
    """Micro-batches that are made as they are read."""

    count: int
    make: Callable[[], Batch]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return (self.make() for _ in range(self.count))


def peak(model: nn.Module, kind: str, runner: Runner, count: int) -> int:
    """Bytes that a step adds at its peak."""
    _, _, call, terms = MODELS[kind](0)
    step = Read(count, lambda: MODELS[kind](1)[1][0])
    model.zero_grad()
    return added_on_cpu(lambda: runner.run(lambda batch: call(model, batch), terms, step, {"samples": 2.0}))[1]


def peaks(kinds: list[str], counts: list[int]) -> list[Any]:
    """(model, layout, the peak of a step of each number of micro-batches)."""
    meshes, rows = Meshes(), []
    for kind, parallel in product(kinds, PIPELINES):
        model, *_ = MODELS[kind](0)
        mesh, layout = meshes.of(parallel)
        (group,) = mesh.across_stages()
        cut_into_stages(model, group, Pipeline.of(parallel))
        runner = runner_of(parallelize(model, mesh, "fsdp", layout=layout), "fsdp", torch.device("cpu"))
        peak(model, kind, runner, 1)  # makes what stays
        rows.append((kind, str(parallel), [peak(model, kind, runner, count) for count in counts]))
    return rows


def test_the_peak_does_not_grow_with_the_micro_batches_of_a_step() -> None:
    for rank in run_ranks(peaks, 2, ["video", "language"], [8, 32]):
        for kind, layout, (few, many) in rank:
            assert many == pytest.approx(few, rel=0.01), (kind, layout)


LANGUAGE = ("model.num_hidden_layers=4", "sequence_length=1023", "train.micro_batch_size=1")


def configs(folder: str, world: int) -> list[tuple[Any, Any]]:
    """Configs of pipelines with what makes their tasks: of a decoder with experts, and of a SoraDiT."""
    found: list[tuple[Any, Any]] = []
    for parallel in STAGED[world]:
        found.append((with_experts(folder, (*LANGUAGE, *parallel)), opened))
        micro = ("train.batch_size=8", "train.micro_batch_size=1", *parallel)
        found.append((config_of(Path(folder), *micro, width=64, depth=4, size=64, frames=9), task_of))
    return found


AGAIN = "memory.activation_policy={block: recompute}"
STAGED = {
    2: [("parallel.pp=2",), ("parallel.pp=2", "parallel.virtual=2")],
    4: [("parallel.pp=2", AGAIN), ("parallel.pp=4", "parallel.extra_warmup=true"), ("parallel.pp=2", "parallel.virtual=2", "memory.states=host")],
}  # fmt: skip


def planned_and_measured(folder: str, world: int) -> list[Any]:
    """(config, bytes between steps and at the peak, planned and measured) of this process."""
    rows = []
    for own, make in configs(folder, world):
        task = make(own)
        plan = plan_memory(own, task=task, world=world, options=False)
        trial = SyntheticStep(own, make(own), CPU, text_tokens=task.domain.longest_text())
        step = (plan.step.shape, plan.step.items, plan.step.batches)
        trial.run(*step)  # makes states
        measured = peak_bytes(CPU, trial.state_bytes, partial(trial.run, *step))
        figures = plan.ranks[stage_of(own)]
        names = f"{own.task} {own.parallel}"
        rows.append((names, figures.static.between, trial.state_bytes, figures.plain_peak(), measured))
    return rows


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_plan_tells_the_memory_of_each_rank(tmp_path: Path, world: int) -> None:
    """Weights, states and gradients, micro-batches in flight, those read, and buffers."""
    for rank, rows in enumerate(run_ranks(planned_and_measured, world, str(tmp_path), world)):
        for names, between, held, planned, measured in rows:
            assert between == pytest.approx(held, rel=0.01), (rank, names)
            assert planned == pytest.approx(measured, rel=0.05), (rank, names)


OWN = (
    "model.num_hidden_layers=4",
    "sequence_length=1023",
    "train.micro_batch_size=1",
    "train.batch_size=8",
    "train.steps=3",
)


def test_stages_keep_to_a_budget_and_learn_the_same(home: Path) -> None:
    staged = (*OWN, "parallel.pp=2")
    ranks = plan_memory(config(home, *staged), task=opened(config(home, *staged)), world=2, with_swap=False).ranks
    budget = (max(each.least() for each in ranks) + ranks[0].plain_peak()) // 2
    assert budget < ranks[0].plain_peak()
    run_ranks(train, 1, str(home), [("budget-whole", OWN)])
    run_ranks(train, 2, str(home), [("budget", (*staged, f"memory.budget={budget}"))])
    found = json.loads((config(home, "name=budget").run_dir / MEMORY_NAME).read_text())
    assert found["measured"]["peak_bytes"] <= budget and len(found["blocks"]) == 4 and any(found["blocks"])
    assert losses(home, "budget") == pytest.approx(losses(home, "budget-whole"), rel=2e-5)
