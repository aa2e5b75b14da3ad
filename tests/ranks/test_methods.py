"""Methods over ranks: preferences, distillation and rollouts are those of one process; two pipeline stages run a model's calls."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from mmspeed.axes import AxisSizes
from mmspeed.device import Device
from mmspeed.initialize import init_weights, materialize, read_weights
from mmspeed.loop.runner import Runner, SequentialRunner
from mmspeed.mesh import make_mesh
from mmspeed.pipelines.methods.finetune import Finetune
from mmspeed.protocols import Method, RunPlace, source_of
from tests.support.method_runs import KINDS, config_of, moved, prepare, task_of, train
from tests.support.pairs import PairedPreferences
from tests.support.rollouts import Rollouts
from tests.support.spawn import run_ranks
from tests.support.stages import TwoStageRunner, halved
from tests.support.teaching import Teaching

LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "ulysses": ("parallel.ulysses=2", "parallel.strategy=fsdp"),
}
METHODS: dict[str, Method] = {
    "preferences": PairedPreferences(beta=0.05),
    "teaching": Teaching(),
    "rollouts": Rollouts(),
}
SERVED = {"preferences": [*KINDS], "teaching": ["listed", "soradit", "wan", "experts"], "rollouts": ["soradit", "wan"]}
CASES = [
    (method, kind, layout)
    for method, kinds in SERVED.items()
    for kind in kinds
    for layout in LAYOUTS
    if (kind, layout) != ("listed", "ulysses")  # no token of it is split
]
COVER = [
    ("preferences", "listed", "fsdp"),
    ("preferences", "qwen3", "ulysses"),
    ("preferences", "deepseek", "fsdp"),
    ("preferences", "soradit", "ddp"),
    ("preferences", "wan", "ulysses"),
    ("preferences", "experts", "fsdp"),
    ("teaching", "listed", "ddp"),
    ("teaching", "wan", "fsdp"),
    ("teaching", "soradit", "ulysses"),
    ("rollouts", "soradit", "fsdp"),
]
Numbers = list[tuple[float, float, dict[str, float]]]  # of steps: loss, norm, terms


def numbers(folder: str, method: str, kind: str, layout: str) -> Numbers:
    """The numbers of three steps, on however many ranks call this."""
    name = f"name={method}-{layout or 'alone'}"
    config = config_of(kind, Path(folder), name, "train.steps=3", "validate.samples=0", *LAYOUTS.get(layout, ()))
    return [(row["loss"], row["grad_norm"], row.get("terms", {})) for row in train(config, METHODS[method])]


def of_cases(folder: str, cases: list[tuple[str, str, str]]) -> list[Numbers]:
    return [numbers(folder, *case) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the caches of all kinds."""
    folder = tmp_path_factory.mktemp("methods")
    prepare(folder, {*KINDS})
    return folder


@pytest.mark.parametrize(
    "cases", [COVER, pytest.param([case for case in CASES if case not in COVER], marks=pytest.mark.slow)], ids=len
)
def test_methods_on_two_processes_are_those_of_one(folder: Path, cases: list[tuple[str, str, str]]) -> None:
    alone = {case: numbers(str(folder), *case, "") for case in sorted({case[:2] for case in cases})}
    for (method, kind, layout), of_layout in zip(cases, run_ranks(of_cases, 2, str(folder), cases)[0], strict=True):
        for own, row in zip(of_layout, alone[method, kind], strict=True):
            for (where, number), expected in zip(flat(own), flat(row), strict=True):
                # sums in another order, grown over three steps of AdamW; a policy's gains of about 1 cancel in its loss
                near = pytest.approx(expected[1], rel=1e-5, abs=1e-5 if method == "rollouts" else 1e-6)
                assert number == near, (method, kind, layout, where)


def flat(row: tuple[float, float, dict[str, float]]) -> list[tuple[str, float]]:
    return [("loss", row[0]), ("norm", row[1]), *sorted(row[2].items())]


# -- two pipeline stages


def gradients(folder: str, kind: str, stages: bool) -> dict[str, Any]:
    """The gradients of a step by name, of a stage's part of the model or of all of it, and the losses that it knows."""
    config, cpu = config_of(kind, Path(folder), "name=stages"), Device("cpu", 0)
    task = task_of(config, Finetune())
    task.domain.open(RunPlace(cpu))
    model = moved(filled(task.build()["model"], config.seed))
    runner: Runner = SequentialRunner(model, "none")
    if stages:
        mesh = make_mesh(cpu, AxisSizes(pp=2, dp_replicate=1, dp_shard=1))
        runner = TwoStageRunner(halved(model, int(mesh.knows_loss), pair=kind == "qwen3"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (learner,) = task.learners(task.updates(), {"model": model}, "none", {"model": optimizer}, cpu.torch_device, stages)
    with closing(task.data(RunPlace(cpu)).steps(0, 1)) as steps:
        step = next(steps)
        record = replace(learner, runner=runner).run(step.batches, step.divisors, 1.0)
    named = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    return {"gradients": named, "losses": [totals["loss"].item() for totals in record.totals]}


def filled(model: Any, seed: int) -> nn.Module:
    """The model with the weights of its files, or of a seed."""
    materialize(model, torch.device("cpu"))
    source = source_of(model)
    init_weights(model, seed) if source is None else read_weights(model, source)
    return cast(nn.Module, model)


@pytest.mark.parametrize("kind", ["qwen3", "wan"])
def test_a_model_in_two_stages_has_the_gradients_of_one(folder: Path, kind: str) -> None:
    whole, (first, last) = gradients(str(folder), kind, False), run_ranks(gradients, 2, str(folder), kind, True)
    assert first["losses"] == [] and last["losses"] == whole["losses"]
    assert first["gradients"].keys() | last["gradients"].keys() == whole["gradients"].keys()
    for name, expected in whole["gradients"].items():
        parts = [stage["gradients"][name] for stage in (first, last) if name in stage["gradients"]]
        np.testing.assert_allclose(
            sum(parts), expected, rtol=0, atol=1e-6 * max(1.0, np.abs(expected).max()), err_msg=name
        )
    assert all(len(stage["gradients"]) < len(whole["gradients"]) for stage in (first, last))
