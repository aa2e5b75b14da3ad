"""MLPs in parts tried out on a device: what the trial finds on made-up machines, that it is a pure function, and what a run says of it."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmspeed.memory import chunked_trial
from mmspeed.memory.chunked_trial import MlpShape, MlpTrial, trial_line, try_mlp_in_parts
from mmspeed.pipelines import TrainPipeline
from tests.support.machine import Machine
from tests.support.mlps import gelu
from tests.support.runs import losses, small_config

CPU = torch.device("cpu")
SHAPE = MlpShape(tokens=96, width=24, units=128, width_out=24, size=32, dtype=torch.float32)


def test_a_machine_that_sums_in_one_order_is_bitwise() -> None:
    with Machine():
        trial = try_mlp_in_parts(SHAPE, CPU, torch.relu)
    assert trial.bitwise and len(trial.distances) == 6
    assert trial_line([trial, trial]) == "memory.mlp_exact: bitwise on this device for 2 of 2 shapes"


@pytest.mark.parametrize("biased", [True, False])
def test_a_machine_where_a_shape_has_other_bits_is_found_out(biased: bool) -> None:
    """Parts have 32 rows, and 64 units: of each kind of product the whole one has other bits, and no other."""
    shape = replace(SHAPE, biased=biased)
    machines = {
        "the result": (Machine(lambda rows, columns, terms: rows == 32), {"result", "the gradient of input"}),
        "a weight": (Machine(lambda rows, columns, terms: (rows, terms) == (64, 96)), {"the gradient of up.weight"}),
        "the other": (Machine(lambda rows, columns, terms: (columns, terms) == (64, 96)), {"the gradient of down.weight"}),
    }  # fmt: skip
    for machine, others in machines.values():
        with machine:
            trial = try_mlp_in_parts(shape, CPU, torch.relu)
        assert {name for name, distance in trial.distances.items() if distance} == others
        assert not trial.bitwise and trial.close and 0 < max(trial.distances.values()) < 1e-6
        line = trial_line([trial])
        assert "bitwise on this device for 0 of 1 shapes" in line and "goes on with ordinary rounding" in line
        assert (
            "96 tokens of 24 x 128 float32 in parts of 32" in line and "differs by" in line and "more than" not in line
        )


def test_what_rounding_does_not_explain_is_said() -> None:
    wrong = MlpTrial(SHAPE, {"result": 0.0, "the gradient of input": 1e-3})
    assert not wrong.close and not wrong.bitwise
    assert "the gradient of input differs by 1e-03 of its largest value, more than the 6e-06 of rounding" in str(wrong)
    assert not MlpTrial(SHAPE, {"result": float("nan")}).close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_is_close_and_the_trial_is_pure(dtype: torch.dtype) -> None:
    """Same shape, same finding; the run's generator, and whether gradients are recorded, are as before."""
    shape = MlpShape(tokens=1017, width=192, units=512, width_out=192, size=299, dtype=dtype)
    before = torch.get_rng_state()
    with torch.no_grad():
        trials = [try_mlp_in_parts(shape, CPU, gelu) for _ in range(2)]
    assert trials[0] == trials[1] and trials[0].close and len(trials[0].distances) == 6
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e-6 < replace(shape, dtype=torch.float32).tolerance < 2e-5
    assert 1e-2 < replace(shape, dtype=torch.bfloat16).tolerance < 2e-2


def test_memory_that_does_not_hold_the_whole_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(chunked_trial, "_operands", full)
    trial = try_mlp_in_parts(SHAPE, CPU, gelu)
    assert not trial.bitwise and trial.close and "not tried" in trial_line([trial])


@pytest.mark.slow
def test_a_run_tries_its_shapes_once_and_says_so(
    small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine whose finding is made up: the run says it, and trains as the run without parts, up to rounding."""
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    tried: list[MlpShape] = []

    def trial(shape: MlpShape, device: torch.device, act: object) -> MlpTrial:
        tried.append(shape)
        return MlpTrial(shape, {"result": 0.0, "the gradient of input": 1e-7})

    monkeypatch.setattr("mmspeed.pipelines.tasks.mlp_trials.try_mlp_in_parts", trial)
    monkeypatch.setattr(logging.getLogger("mmspeed"), "propagate", True)
    runs = {
        name: small_config(tmp_path, f"name={name}", *extra)
        for name, extra in {
            "plain": (),
            "sums": ("memory.mlp_chunk=8", "memory.mlp_exact=false"),
            "parts": ("memory.mlp_chunk=8",),
        }.items()
    }
    for name, config in runs.items():
        assert not tried, "only mlp_chunk with mlp_exact is tried"
        caplog.clear()
        TrainPipeline(config).run()
        if name == "parts":
            assert tried and len(set(tried)) == len(tried) and all(shape.size == 8 for shape in tried)
        assert ("memory.mlp_exact" in caplog.text) == (name == "parts")
    assert losses(runs["parts"]) == pytest.approx(losses(runs["plain"]), rel=1e-4)
