"""Faults of runs in pipeline stages: values that are not finite, signals, processes that die or stop, and such with another config."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.cli.failures import describe
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import StepEvent
from tests.ranks.test_expert_faults import ENDS, Spoils, ends_in_a_line, home, rows
from tests.ranks.test_expert_states import config, losses, named, train
from tests.support.covers import slow_but
from tests.support.launched import losses_by_step
from tests.support.spawn import run_ranks

__all__ = ["home"]  # a fixture
FOUR = ("model.num_hidden_layers=4", "train.micro_batch_size=1", "train.steps=8")
MANY = ("train.batch_size=8",)
BALANCED = ("model.balance=sequence", "objective.balance=0.01")
DENSE = ("model.shape=tiny-qwen3-8b",)  # no module of it counts, so that stages alone tell
EXPERTS = ("parallel.pp=2", "parallel.virtual=2", "parallel.ep=2", *MANY)  # on four processes
LAYOUTS = {
    "pp": ("parallel.pp=2",),
    "virtual": ("parallel.pp=2", "parallel.virtual=2"),
    "split": ("parallel.pp=2", "parallel.schedule=zb_h1"),
    "pairs": ("parallel.pp=2", "parallel.virtual=2", "parallel.schedule=dualpipe_v"),
    "overlap": (*EXPERTS, "parallel.schedule=overlap"),
    "pairs of experts": (*EXPERTS, "parallel.schedule=dualpipe_v"),
}
SPOILED = {"text": BALANCED, "router": BALANCED, "dense": DENSE}


def world(layout: str) -> int:
    """The processes of a layout."""
    return 4 if LAYOUTS[layout][: len(EXPERTS)] == EXPERTS else 2


def spoiled(folder: str, name: str, layout: tuple[str, ...], cases: list[str]) -> list[str]:
    """The error of each spoiled run, empty where there is none."""
    errors = []
    for what in cases:
        run = config(Path(folder), f"name={what}-{name}", *FOUR, *layout, *SPOILED[what])
        try:
            TrainPipeline(run, callbacks=[Spoils("router" if what == "router" else "text")]).run()
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, {"virtual"}))
def test_what_is_not_finite_is_told_and_left_out_as_by_one_process(home: Path, layout: str) -> None:
    name, cases = named(layout), [what for what in SPOILED if what != "dense" or world(layout) == 2]
    alone = spoiled(str(home), f"{name}-alone", MANY if world(layout) == 4 else (), cases)
    assert run_ranks(spoiled, world(layout), str(home), name, LAYOUTS[layout], cases) == [alone] * world(layout)
    assert {*alone} - {alone[1]} == {""}
    assert "(not finite from model.layers.1.mlp.gate on). Nothing was updated." in alone[1]
    for what in cases:
        found, expected = rows(home, f"{what}-{name}"), rows(home, f"{what}-{name}-alone")
        origins = {row.pop("origin", None) for row in found}, {row.pop("origin", None) for row in expected}
        told = "the tokens behind pipeline stage 0"
        assert origins == (({told}, {None}) if what == "dense" else ({"model.layers.1.mlp.gate"},) * 2)
        assert found == expected and bool(found)
        assert losses(home, f"{what}-{name}") == pytest.approx(losses(home, f"{what}-{name}-alone"), rel=2e-5)


# -- signals


class Signals(TrainCallback):
    """Sends the second process a signal in some forward pass of the third step, while micro-batches are in flight."""

    def __init__(self, at: int) -> None:
        self._left = at

    def on_step(self, event: StepEvent) -> None:
        if event.step == 2 and event.rank == 1:
            model: Any = event.models["model"]
            self._handle = model.register_forward_pre_hook(self._send)

    def _send(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            self._handle.remove()
            os.kill(os.getpid(), signal.SIGTERM)


def signalled(folder: str, name: str, layout: tuple[str, ...], stops: bool) -> int:
    """The steps of a run that is stopped in its third, or goes on from there."""
    run = config(Path(folder), f"name={name}", *FOUR, *BALANCED, *layout)
    TrainPipeline(run, callbacks=[Signals(2 * run.parallel.virtual + 1)] if stops else []).run()  # in its midst
    return max(row["step"] for row in read_metrics(run.run_dir / "metrics.jsonl") if row["kind"] == "train")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["virtual", "split", "pairs", "overlap", "pairs of experts"])
def test_a_signal_within_a_step_stops_a_pipeline_and_the_run_goes_on(home: Path, layout: str) -> None:
    count, settings, name = world(layout), LAYOUTS[layout], named("signalled", layout)
    whole, alone = f"{name}-whole", f"{name}-alone"
    signalled(str(home), alone, MANY if count == 4 else (), False)
    assert run_ranks(signalled, count, str(home), whole, settings, False) == [8] * count
    assert run_ranks(signalled, count, str(home), name, settings, True) == [3] * count
    facts = [json.loads((config(home, f"name={each}").run_dir / "run.json").read_text()) for each in (name, alone)]
    assert facts[0]["parameters"] == facts[1]["parameters"]  # of all stages
    assert run_ranks(signalled, count, str(home), name, settings, False) == [8] * count
    assert losses(home, name) == losses(home, whole) == pytest.approx(losses(home, alone), rel=2e-5)


# -- processes


class Full(TrainCallback):
    """Has no memory left in the second process, while the third step's micro-batches are in flight: in a pair where the layout has some."""

    def __init__(self, backward: bool) -> None:
        self.backward, self._left = backward, 2 if backward else 3

    def on_step(self, event: StepEvent) -> None:
        if event.step == 2 and event.rank == 1:
            model: Any = event.models["model"]
            mlp = [layer for layer in model.layers.children() if hasattr(layer, "mlp")][-1].mlp
            (mlp.register_full_backward_pre_hook if self.backward else mlp.register_forward_pre_hook)(self._fail)

    def _fail(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def told(folder: str, layout: str, backward: bool) -> str:
    """What a run says when a process has no memory left."""
    run = config(Path(folder), f"name={named('full', layout, str(backward))}", *FOUR, *LAYOUTS[layout])
    try:
        TrainPipeline(run, callbacks=[Full(backward)]).run()
    except Exception as error:
        return describe(error).text
    return ""


@pytest.mark.parametrize(
    "where", slow_but([(layout, back) for layout in ("virtual", "pairs", "overlap") for back in (False, True)], [("pairs", True)]), ids=str,
)  # fmt: skip
def test_an_error_within_a_pass_is_told_as_by_one_process(home: Path, where: tuple[str, bool]) -> None:
    layout, backward = where
    first, second, *others = run_ranks(told, world(layout), str(home), layout, backward)
    assert all(each.startswith("error: lost the connection to another rank") for each in (first, *others)), first
    assert "out of memory" in second and "internal error" not in second, second


# Python runs it before its command: a process acts in some call of a function, in a thread, with micro-batches in flight
SITE = """
import os, signal, sys, threading
if os.environ.get("RANK") == "1" and "train" in sys.orig_argv:
    from {module} import {owner}
    plain, calls = {owner}.{name}, []

    def counted(*args):
        if (threading.current_thread() is threading.main_thread()) == {main}:
            calls.append(None)
            if len(calls) == {at}:
                os.kill(os.getpid(), signal.{signal})
        return plain(*args)

    {owner}.{name} = counted
"""
WHERE = {
    "pass": ("mmspeed.parallel.stages", "Stages", "run_stage", True, 30),
    "weights": ("mmspeed.compute.wgrad", "WeightGradients", "take", True, 20),  # between gradients of input and weights
    "pair": ("mmspeed.comm.halves", "PendingExchange", "_complete", False, 12),  # in the backward pass of a pair
}
CASES = [
    *((how, "virtual", "pass") for how in ENDS), ("SIGKILL", "split", "weights"), *((how, "overlap", "pair") for how in ENDS),
    ("SIGKILL", "pairs of experts", "pair"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how, layout, where", CASES)
def test_a_process_that_ends_within_a_schedule_ends_the_run_in_a_line(
    home: Path, tmp_path: Path, how: str, layout: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = SITE.format(**dict(zip(("module", "owner", "name", "main", "at"), WHERE[where], strict=True)), signal=how)
    settings, count = (*FOUR, *LAYOUTS[layout], "checkpoint.every=2"), world(layout)
    with monkeypatch.context() as patch:
        name = ends_in_a_line(home, tmp_path, how, patch, site, *settings, processes=count)
    whole = f"{name}-whole"
    took = run_ranks(train, count, str(home), [(each, (*settings, "train.steps=12")) for each in (name, whole)])[0]
    assert min(took[name]) > min(took[whole])  # it went on
    of_parts, of_whole = (losses_by_step(config(home, f"name={each}")) for each in (name, whole))
    assert of_parts == of_whole and len(of_whole) == 12


DIFFER = {"virtual": ("parallel.virtual=2",), "seed": ("seed=7",), "warm-up": ("parallel.extra_warmup=true",)}


def differing(folder: str) -> list[str]:
    """The errors of runs of which the second process has another config."""
    errors = []
    for name, other in DIFFER.items():
        own = other if os.environ["RANK"] == "1" else ()
        with pytest.raises(UserError) as caught:
            TrainPipeline(config(Path(folder), f"name=differs-{name}", *FOUR, *LAYOUTS["pp"], *own)).run()
        errors.append(str(caught.value))
    return errors


def test_processes_with_other_pipelines_are_refused(home: Path) -> None:
    for errors in run_ranks(differing, 2, str(home)):
        for error, key in zip(
            errors, ("parallel.virtual is 2, not 1", "seed is 7", "parallel.extra_warmup is true"), strict=True
        ):
            assert key in error and "on rank 1" in error and "\n" not in error
