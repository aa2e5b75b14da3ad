"""Spoiled samples in whole runs, on one process and on two ranks: what is left out, what counts, and what is said."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import steps_in
from mmspeed.pipelines.training.events import StepEvent
from tests.support.checkpoints import whole_checkpoint
from tests.support.spawn import run_ranks
from tests.support.spikes import (
    LONG,
    QUIET,
    RULE,
    SPIKE,
    Recorder,
    cache_with,
    first_epoch,
    rows,
    spoiled,
    train,
)
from tests.support.toy_runs import train_toy


@pytest.mark.slow
def test_sound_samples_of_a_step_count_beside_spoiled_ones(tmp_path: Path) -> None:
    cache_with(tmp_path, {4: math.nan})
    train_toy(str(tmp_path), ("name=one", *QUIET))
    run_ranks(train_toy, 2, str(tmp_path), ("name=two", *QUIET))
    for name in ("one", "two"):
        said = rows(tmp_path, name, "left_out")
        assert [row["samples"] for row in said] == [["4.mp4"]] * 2  # once in each of two epochs
        train = rows(tmp_path, name, "train")
        assert [row["skipped_steps"] for row in train] == [0] * 6 and train[-1]["left_out_samples"] == 2
    one, two = ([row["loss"] for row in rows(tmp_path, name, "train")] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    assert all(map(math.isfinite, one))


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return first_epoch(tmp_path_factory.mktemp("order"))


def test_a_run_rolls_back_and_leaves_the_samples_of_a_spike_out(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, math.nan, SPIKE)
    overrides = ("checkpoint.every=2", "checkpoint.keep_last=1", RULE.format("roll_back"))
    recorder = train(tmp_path, "name=whole", "train.steps=8", *overrides)
    assert [step for step, _ in recorder.steps] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]  # back to the checkpoint of step 4
    last = dict(recorder.steps)
    used, all_uses = (Counter(itertools.chain.from_iterable(steps)) for steps in (last.values(), order))
    assert last[SPIKE] == [] and used == all_uses - Counter(order[SPIKE - 1])  # each other sample once
    (row,) = rows(tmp_path, "whole", "roll_back")
    assert (row["step"], row["last"], row["to"]) == (SPIKE, SPIKE, 4)
    assert sorted(row["samples"]) == sorted(order[SPIKE - 1])
    metrics = rows(tmp_path, "whole", "train")
    assert (metrics[-1]["roll_backs"], metrics[-1]["left_out_samples"], metrics[-1]["skipped_steps"]) == (1, 3, 0)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 7, 8]
    assert all(tensor.isfinite().all() for tensor in whole_checkpoint(tmp_path / "runs" / "whole").values())
    # stopped after the roll-back, and gone on from a checkpoint: the same bits
    train(tmp_path, "name=parts", "train.steps=7", *overrides)
    train(tmp_path, "name=parts", "train.steps=8", *overrides)
    whole, parts = (whole_checkpoint(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_a_run_that_dies_after_a_roll_back_takes_the_same_steps(tmp_path: Path, order: list[list[str]]) -> None:
    """No checkpoint knows of the roll-back yet: the spike comes again, and so does the roll-back."""

    class Dies(Recorder):
        def on_step(self, event: StepEvent) -> None:
            super().on_step(event)
            if len(self.steps) == 7:
                raise RuntimeError("dies")

    spoiled(tmp_path, order, 1000.0, SPIKE)
    overrides = ("train.steps=8", "checkpoint.every=2", RULE.format("roll_back"))
    train(tmp_path, "name=whole", *overrides)
    with pytest.raises(RuntimeError, match="dies"):
        train(tmp_path, "name=dies", *overrides, recorder=Dies())
    assert [step for step, _ in train(tmp_path, "name=dies", *overrides).steps] == [5, 6, 5, 6, 7, 8]
    whole, parts = (whole_checkpoint(tmp_path / "runs" / name) for name in ("whole", "dies"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert len(rows(tmp_path, "dies", "roll_back")) == 1


@pytest.mark.slow
def test_ranks_roll_back_together(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, 1000.0, SPIKE)
    overrides = (*LONG, "checkpoint.every=2", RULE.format("roll_back"), "train.steps=8")
    train_toy(str(tmp_path), ("name=one", *overrides))
    run_ranks(train_toy, 2, str(tmp_path), ("name=two", *overrides))
    assert rows(tmp_path, "one", "roll_back")[0]["samples"] == rows(tmp_path, "two", "roll_back")[0]["samples"]
    one, two = ([row["loss"] for row in rows(tmp_path, name, "train")] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


def test_a_run_rolls_back_so_often_and_then_ends(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, 1000.0, SPIKE, SPIKE + 1)
    words = rf"^step 7: loss .*there were 1 roll-backs before\. Samples: {order[SPIKE][0]}"
    with pytest.raises(UserError, match=words):
        train(tmp_path, "train.steps=8", "checkpoint.every=2", RULE.format("roll_back"))


def test_without_a_checkpoint_from_before_a_spike_the_run_ends(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, 1000.0, SPIKE)
    with pytest.raises(UserError, match=r"^step 6: loss .*there is none to return to"):
        train(tmp_path, "train.steps=8", "checkpoint.every=5", RULE.format("roll_back"))


def test_a_spike_stops_the_run_and_spares_the_checkpoints_before_it(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, 1000.0, SPIKE)
    overrides = ("train.steps=8", "checkpoint.every=1", "checkpoint.keep_last=1")
    with pytest.raises(UserError, match=rf"^step 6: loss .* limits are .*Samples: {order[SPIKE - 1][0]}") as caught:
        train(tmp_path, *overrides, RULE.format("stop"))
    assert len(str(caught.value).splitlines()) == 1
    assert steps_in(tmp_path / "runs" / "small" / "checkpoints") == [4, 5]  # 5 has no calm step after it
    train(tmp_path, *overrides, RULE.format("none"))
    # 5 is where it went on, and 4, from before the spike, is never replaced
    assert steps_in(tmp_path / "runs" / "small" / "checkpoints") == [4, 5, 8]


def test_a_run_that_diverges_in_its_first_steps_ends(tmp_path: Path) -> None:
    cache_with(tmp_path, {})
    with pytest.raises(UserError, match=r"^steps [2-9] to \d+: loss .* the limits are \d+\.\d+ and inf"):
        train(tmp_path, "train.steps=30", "train.lr=9", "train.divergence.action=stop")


def test_the_update_of_a_step_above_the_limit_is_not_applied(tmp_path: Path, order: list[list[str]]) -> None:
    spoiled(tmp_path, order, 1000.0, SPIKE)
    rule = RULE.format("skip").replace("steps: 1", "steps: 2")
    recorder = train(tmp_path, "name=one", "train.steps=8", rule)
    assert [step for step, sources in recorder.steps if not sources] == [SPIKE]
    run_ranks(train_toy, 2, str(tmp_path), ("name=two", "train.steps=8", *LONG, rule))
    for name in ("one", "two"):
        assert rows(tmp_path, name, "train")[-1]["skipped_steps"] == 1
    one, two = ([row["loss"] for row in rows(tmp_path, name, "train")] for name in ("one", "two"))
    assert [loss is None for loss in one] == [step == SPIKE for step in range(1, 9)]
    assert [loss or 0.0 for loss in two] == pytest.approx([loss or 0.0 for loss in one], rel=1e-4)
