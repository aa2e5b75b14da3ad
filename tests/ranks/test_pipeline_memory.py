"""The memory of a pipeline's ranks: as much for many micro-batches as for few, as planned, and within budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.config.parallel import ParallelConfig
from mmspeed.loop.pipeline import runner_of
from mmspeed.loop.runner import Runner
from mmspeed.memory.planning.peak import added_on_cpu
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch
from tests.ranks.test_pipelines import MODELS
from tests.support.added_model import Meshes
from tests.support.spawn import run_ranks

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
