"""Whole runs of published video transformers on layouts: those of one process, with averages, validation and checkpoints, and they go on.

Weights after six steps differ by what Adam makes of sums in another order; a stopped run goes on to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.published import PublishedVideoDomain
from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.foreign_training import CALLS, EXACT
from tests.support.published import load, prepare, published_config
from tests.support.runs import losses
from tests.support.spawn import run_ranks

SPARSE = f"model.sparse={{{EXACT}, planner: clusters}}"
# label -> (model, keys of the config)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("wan", ("parallel.tp=2",)),
    "tp, sparse, regions": ("wan", ("parallel.tp=2", SPARSE, "memory.activation_policy.mlp=recompute")),
    "ulysses, sparse": ("wan", ("parallel.ulysses=2", SPARSE)),
    "ltx ring, accumulated": ("ltx", ("parallel.ring=2", "train.micro_batch_size=1")),
    "stages of tp": ("wan", ("parallel.pp=2", "parallel.tp=2", "train.micro_batch_size=1")),
    "ltx stages of ring": ("ltx", ("parallel.pp=2", "parallel.ring=2", "train.micro_batch_size=1")),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    return folder


def train(folder: str, name: str, overrides: tuple[str, ...]) -> None:
    """Train, on however many ranks call this."""
    config = published_config(Path(folder), name, *overrides)
    TrainPipeline(
        config, task=PublishedVideoDomain(config, lambda: load(Path(folder), name), call=CALLS.get(name))
    ).run()


def whole_and_stopped(folder: str, name: str, label: str, overrides: tuple[str, ...]) -> None:
    """A run of six steps, and one that stopped after two of them."""
    train(folder, name, (f"name={label}-whole", *overrides))
    for count in (2, 6):
        train(folder, name, (f"name={label}-stopped", f"train.steps={count}", *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_runs_on_a_layout_are_those_of_one_process_and_go_on(home: Path, run: str) -> None:
    name, overrides = RUNS[run]
    label = run.replace(", ", "-").replace(" ", "-")
    run_ranks(whole_and_stopped, 2 ** sum("parallel." in key for key in overrides), str(home), name, label, overrides)
    alone = tuple(key for key in overrides if key == SPARSE)
    train(str(home), name, (f"name={label}-alone", *alone))
    one, whole, stopped = (
        published_config(home, name, f"name={label}-{which}") for which in ("alone", "whole", "stopped")
    )
    assert losses(whole) == pytest.approx(losses(one), rel=1e-5)
    truth, state = whole_checkpoint(one.run_dir), whole_checkpoint(whole.run_dir)
    for prefix in ("model.", "ema."):
        assert farthest(state, truth, prefix) < 2e-5, prefix
    assert losses(stopped) == losses(whole)
    assert differing(whole_checkpoint(stopped.run_dir), state) == []
    thresholds = {key for key in state if key.endswith(".tau")}
    assert bool(thresholds) == (SPARSE in overrides)
