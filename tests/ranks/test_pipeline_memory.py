"""The memory of a pipeline's ranks: as much for many micro-batches as for few, as planned, and within budgets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mmspeed.memory.planning.peak import peak_bytes
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME
from mmspeed.pipelines.tuning.memory_stages import stage_of
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from tests.ranks.test_expert_states import config, home, losses, train
from tests.ranks.test_memory_choice import opened, with_experts
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_memory_choice import CPU, config_of, task_of

__all__ = ["home"]  # a fixture

LANGUAGE = ("model.num_hidden_layers=4", "sequence_length=1023", "train.micro_batch_size=1")


def configs(folder: str, world: int, waits: bool) -> list[tuple[Any, Any]]:
    """Configs of pipelines with what makes their tasks: of a decoder with experts, and of a SoraDiT."""
    found: list[tuple[Any, Any]] = []
    for parallel in (WAITING if waits else STAGED)[world]:
        found.append((with_experts(folder, (*LANGUAGE, *parallel)), opened))
        if EVEN[0] in parallel:
            continue
        micro = ("train.batch_size=8", "train.micro_batch_size=1", *parallel)
        found.append((config_of(Path(folder), *micro, width=64, depth=4, size=64, frames=9), task_of))
    return found


AGAIN = "memory.activation_policy={block: recompute}"
STAGED = {
    2: [("parallel.pp=2",), ("parallel.pp=2", "parallel.virtual=2")],
    4: [("parallel.pp=2", AGAIN), ("parallel.pp=4", "parallel.extra_warmup=true"), ("parallel.pp=2", "parallel.virtual=2", "memory.states=host")],
}  # fmt: skip
EVEN = ("model.num_experts=4", "model.num_experts_per_tok=4")  # all experts take each token, as many as planned
FOLDED = ("parallel.pp=2", "parallel.virtual=2")
WAITING = {
    2: [("parallel.pp=2", "parallel.schedule=zb_h1"), (*FOLDED, "parallel.schedule=zbv", "device.dtype=bfloat16"), (*FOLDED, "parallel.schedule=dualpipe_v")],
    4: [(*FOLDED, "parallel.ep=2", *EVEN, "parallel.schedule=overlap")],
}  # fmt: skip


def planned_and_measured(folder: str, world: int, waits: bool) -> list[Any]:
    """(config, bytes between steps and at the peak, planned and measured) of this process."""
    rows = []
    for own, make in configs(folder, world, waits):
        task = make(own)
        plan = plan_memory(own, task=task, world=world, options=False)
        trial = SyntheticStep(own, make(own), CPU, text_tokens=task.domain.longest_text())
        step = (plan.step.shape, plan.step.items, plan.step.batches)
        trial.run(*step)  # makes states
        counts = (step[2], 4, 32) if waits else (step[2], 4 * step[2])
        measured = [peak_bytes(CPU, trial.state_bytes, partial(trial.run, *step[:2], count)) for count in counts]
        figures = plan.ranks[stage_of(own)]
        names = f"{own.task} {'recomputed' if own.memory.activation_policy else ''} {own.parallel}"
        weights = figures.static.between + figures.static.gradients
        rows.append((names, figures.static.between, trial.state_bytes, figures.plain_peak(), measured, weights))
    return rows


@pytest.mark.parametrize(
    ("world", "waits"),
    [(2, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, False), (2, True), (4, True)))],
)
def test_a_plan_tells_the_memory_of_each_rank(tmp_path: Path, world: int, waits: bool) -> None:
    """Weights, states and gradients, micro-batches in flight, those read, and buffers; more micro-batches take no more."""
    for rank, rows in enumerate(run_ranks(planned_and_measured, world, str(tmp_path), world, waits, timeout=550)):
        for names, between, held, planned, measured, weights in rows:
            assert between == pytest.approx(held, rel=0.01), (rank, names)
            over = 0.09 if "recomputed" in names else 0.05  # those of the last stage are planned 8 % too high
            assert 0.95 * measured[0] <= planned <= (1 + over) * measured[0], (rank, names, planned, measured)
            if world == 2 or waits:  # else gradients that shards send in the last backward pass are planned too high
                activations = pytest.approx(measured[0] - weights, rel=0.05)
                assert planned - weights == activations, (rank, names, planned, measured)
            late = 0.01 if world == 2 else 0.05  # gloo may free buffers of shards a little later
            assert max(measured[1:]) == pytest.approx(measured[0], rel=late), (rank, names)


OWN = ("model.num_hidden_layers=4", "sequence_length=255", "train.micro_batch_size=1", "train.steps=3")


def test_stages_keep_to_a_budget_and_learn_the_same(home: Path) -> None:
    staged = (*OWN, "parallel.pp=2")
    ranks = plan_memory(config(home, *staged), task=opened(config(home, *staged)), world=2, with_swap=False).ranks
    least, plain = max(each.least() for each in ranks), ranks[0].plain_peak()
    budget = least + (plain - least) // 4
    run_ranks(train, 1, str(home), [("budget-whole", OWN)])
    run_ranks(train, 2, str(home), [("budget", (*staged, f"memory.budget={budget}"))])
    found = json.loads((config(home, "name=budget").run_dir / MEMORY_NAME).read_text())
    assert found["measured"]["peak_bytes"] <= budget and len(found["blocks"]) == 5 and any(found["blocks"])
    assert losses(home, "budget") == pytest.approx(losses(home, "budget-whole"), rel=2e-5)
