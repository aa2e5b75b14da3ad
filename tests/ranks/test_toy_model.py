"""A model that mmspeed does not know, as it stands, trains through the pipeline on 1, 2 and 4 processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.log import read_metrics
from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.support.toy import ToyDiT
from tests.support.toy_runs import toy_config, train_toy, write_toy_cache

LAYOUTS = {
    # sizes that 4 does not divide, and three samples: a filler in each step
    "fsdp-4": (4, ("parallel.strategy=fsdp",)),
    "fsdp-2-accumulated": (2, ("parallel.strategy=fsdp", "train.micro_batch_size=1")),
    "ddp-4": (4, ("parallel.strategy=ddp", "train.micro_batch_size=1")),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache, and the run `small` of one process."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy_cache(toy_config(folder))
    train_toy(str(folder))
    return folder


def test_one_process_trains_the_weights_that_the_model_came_with(home: Path) -> None:
    config = toy_config(home)
    curve = losses(config)
    assert len(curve) == 6 and len(set(curve)) == 6
    state, start = whole_checkpoint(config.run_dir), dict(ToyDiT().named_parameters())
    assert {name.removeprefix("model.") for name in state if name.startswith("model.")} == {*ToyDiT().state_dict()}
    moved = {name: (state[f"model.{name}"] - value).abs().max().item() for name, value in start.items()}
    # every parameter learns; six steps of 1e-3 at most, 5e-3 with the warm-up
    assert all(0 < far < 6e-3 for far in moved.values()), moved


def test_its_own_count_of_operations_is_reported(home: Path) -> None:
    config = toy_config(home)
    for row in read_metrics(config.run_dir / "metrics.jsonl"):
        if row["kind"] == "train":
            seconds, toy = row["samples"] / row["samples_per_s"], ToyDiT()
            lengths = [toy.flops((2, 2, 3), length) * 3 * row["samples"] for length in (3, 4)]
            assert any(row["mfu"] * seconds * 0.1e12 == pytest.approx(flops) for flops in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_equal_one_process(home: Path, layout: str) -> None:
    """Gradients are sums of the same numbers in another order: a few eps, of which Adam makes less than that share of its steps of 1e-3."""
    world, overrides = LAYOUTS[layout]
    run_ranks(train_toy, world, str(home), (f"name={layout}", *overrides))
    config, one = toy_config(home, f"name={layout}"), toy_config(home)
    assert losses(config) == pytest.approx(losses(one), rel=1e-6)
    state, truth = whole_checkpoint(config.run_dir), whole_checkpoint(one.run_dir)
    for prefix in ("model.", "ema."):
        assert farthest(state, truth, prefix) < 1e-6


def stopped(folder: str) -> None:
    """A sharded run that stops after each of its steps."""
    for steps in range(1, 7):
        train_toy(folder, ("name=parts", f"train.steps={steps}", *LAYOUTS["fsdp-2-accumulated"][1]))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bitwise(home: Path) -> None:
    run_ranks(train_toy, 2, str(home), ("name=whole", *LAYOUTS["fsdp-2-accumulated"][1]))
    run_ranks(stopped, 2, str(home))
    parts, whole = (toy_config(home, f"name={name}") for name in ("parts", "whole"))
    assert losses(parts) == losses(whole)
    assert differing(whole_checkpoint(parts.run_dir), whole_checkpoint(whole.run_dir)) == []
