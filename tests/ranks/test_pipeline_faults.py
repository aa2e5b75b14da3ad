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
from tests.ranks.test_expert_states import config, losses
from tests.support.spawn import run_ranks

__all__ = ["home"]  # a fixture
FOUR = ("model.num_hidden_layers=4", "train.micro_batch_size=1", "train.steps=8")
BALANCED = ("model.balance=sequence", "objective.balance=0.01")
DENSE = ("model.shape=tiny-qwen3-8b",)  # no module of it counts, so that stages alone tell
LAYOUTS = {
    "pp": ("parallel.pp=2",),
    "virtual": ("parallel.pp=2", "parallel.virtual=2"),
    "split": ("parallel.pp=2", "parallel.schedule=zb_h1"),
    "pairs": ("parallel.pp=2", "parallel.virtual=2", "parallel.schedule=dualpipe_v"),
}
SPOILED = {"text": BALANCED, "router": BALANCED, "dense": DENSE}


def spoiled(folder: str, layout: str) -> list[str]:
    """The error of each spoiled run, empty where there is none."""
    errors = []
    for name, settings in SPOILED.items():
        run = config(Path(folder), f"name={name}-{layout}", *FOUR, *settings, *LAYOUTS.get(layout, ()))
        try:
            TrainPipeline(run, callbacks=[Spoils("router" if name == "router" else "text")]).run()
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    "layout", ["virtual", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pp", "split", "pairs"))]
)
def test_what_is_not_finite_is_told_and_left_out_as_by_one_process(home: Path, layout: str) -> None:
    alone, (first, second) = spoiled(str(home), "alone"), run_ranks(spoiled, 2, str(home), layout)
    assert first == second == alone and alone[0] == alone[2] == ""
    assert "(not finite from model.layers.1.mlp.gate on). Nothing was updated." in alone[1]
    for name in SPOILED:
        found, expected = rows(home, f"{name}-{layout}"), rows(home, f"{name}-alone")
        origins = {row.pop("origin", None) for row in found}, {row.pop("origin", None) for row in expected}
        told = "the tokens behind pipeline stage 0"
        assert origins == (({told}, {None}) if name == "dense" else ({"model.layers.1.mlp.gate"},) * 2)
        assert found == expected and bool(found)
        assert losses(home, f"{name}-{layout}") == pytest.approx(losses(home, f"{name}-alone"), rel=2e-5)


# -- signals


class Signals(TrainCallback):
    """Sends the second process a signal while the third step's micro-batches are in flight."""

    def on_step(self, event: StepEvent) -> None:
        if event.step == 2 and event.rank == 1:
            model: Any = event.models["model"]
            self._handle = model.register_forward_pre_hook(self._send)

    def _send(self, *_: object) -> None:
        self._handle.remove()
        os.kill(os.getpid(), signal.SIGTERM)


def signalled(folder: str, stops: bool) -> int:
    """The steps of a run that is stopped in its third, or goes on from there."""
    run = config(Path(folder), "name=signalled", *FOUR, *BALANCED, *LAYOUTS["virtual"])
    TrainPipeline(run, callbacks=[Signals()] if stops else []).run()
    return max(row["step"] for row in read_metrics(run.run_dir / "metrics.jsonl") if row["kind"] == "train")


@pytest.mark.slow
def test_a_signal_within_a_step_stops_a_pipeline_and_the_run_goes_on(home: Path) -> None:
    TrainPipeline(config(home, "name=not-signalled", *FOUR, *BALANCED)).run()
    assert run_ranks(signalled, 2, str(home), True) == [3, 3]
    facts = [
        json.loads((config(home, f"name={name}").run_dir / "run.json").read_text())
        for name in ("signalled", "not-signalled")
    ]
    assert facts[0]["parameters"] == facts[1]["parameters"]  # of all stages
    assert run_ranks(signalled, 2, str(home), False) == [8, 8]
    assert losses(home, "signalled") == pytest.approx(losses(home, "not-signalled"), rel=2e-5)


# -- processes


class Full(TrainCallback):
    """Has no memory left in the second process, while the third step's micro-batches are in flight."""

    def on_step(self, event: StepEvent) -> None:
        if event.step == 2 and event.rank == 1:
            model: Any = event.models["model"]
            model.layers[1].mlp.register_forward_pre_hook(self._fail)

    def _fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def told(folder: str) -> str:
    """What a run says when a process has no memory left."""
    run = config(Path(folder), "name=full", *FOUR, *LAYOUTS["virtual"])
    try:
        TrainPipeline(run, callbacks=[Full()]).run()
    except Exception as error:
        return describe(error).text
    return ""


def test_an_error_within_a_pass_is_told_as_by_one_process(home: Path) -> None:
    first, second = run_ranks(told, 2, str(home))
    assert first.startswith("error: lost the connection to another rank"), first
    assert "out of memory" in second and "internal error" not in second, second


# Python runs it before its command: the last process acts in its thirtieth pass, with micro-batches in flight
SITE = """
import os, signal, sys
if os.environ.get("RANK") == "1" and "train" in sys.orig_argv:
    from mmspeed.parallel.stages import Stages
    plain, calls = Stages.run_stage, []

    def run_stage(*args):
        calls.append(args)
        if len(calls) == 30:
            os.kill(os.getpid(), signal.{signal})
        return plain(*args)

    Stages.run_stage = run_stage
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_within_a_schedule_ends_the_run_in_a_line(
    home: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_in_a_line(home, tmp_path, how, monkeypatch, SITE, *FOUR, *LAYOUTS["virtual"])


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
