"""Weights of a pipeline's shards are gathered once for neighbouring passes of a stage, with the gradients of gathering for each pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmspeed.config.parallel import ParallelConfig
from mmspeed.loop.pipeline import PipelineRunner
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.parallel.tensor import local
from mmspeed.plan.schedules import Pipeline
from mmspeed.torch_internals import TorchDispatchMode
from tests.support.added_model import Meshes
from tests.support.pipeline_steps import made
from tests.support.spawn import run_ranks


class Gathers(TorchDispatchMode):
    """Counts the exchanges that bring the parts of tensors together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def gathered(parallel: ParallelConfig, count: int, again: bool, meshes: Meshes) -> tuple[Any, ...]:
    """Gathers of two steps, those of blocks in the table (one for each that a run of passes begins with), and this process's gradients."""
    case = made("sora", 4)
    batches = [case.batch(number, number % 3, 1.0) for number in range(count)]
    mesh, layout = meshes.of(parallel)
    (group,) = mesh.across_stages()
    pipeline = Pipeline.of(parallel)
    stages = cut_into_stages(case.model, group, pipeline)
    stages.gathers_again = again
    model = parallelize(case.model, mesh, "fsdp", layout=layout)
    learner = case.learner(model, "fsdp", None)
    assert isinstance(learner.runner, PipelineRunner)
    counts = []
    for _ in range(2):  # the first step is like any other
        model.zero_grad()
        with Gathers() as gathers:
            learner.run(batches, {"samples": 1.0}, 1.0)
        counts.append(gathers.count)
    row = pipeline.table(count)[dist.get_rank(group)]
    passes = [part.stage for entry in row for part in entry.parts if part.kind != "weight"]
    runs = [stage for place, stage in enumerate(passes) if again or place == 0 or passes[place - 1] != stage]
    blocks = sum(len(stages.bounds[stage]) for stage in runs)
    return counts, blocks, {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def all_gathered() -> list[Any]:
    meshes, found = Meshes(), []
    for parallel in (ParallelConfig(pp=2), ParallelConfig(pp=2, virtual=2, extra_warmup=True)):
        once, again = (gathered(parallel, 5, way, meshes) for way in (False, True))
        equal = [name for name, grad in once[2].items() if torch.equal(grad, again[2][name])]
        found.append((once[:2], again[:2], len(equal), len(once[2])))
    return found


@pytest.mark.slow
def test_weights_are_gathered_once_for_neighbouring_passes_of_a_stage() -> None:
    for rank in run_ranks(all_gathered, 4):
        for (once, of_runs), (again, of_passes), equal, count in rank:
            assert once == [of_runs + 1] * 2 and min(again) > of_passes and equal == count > 8
