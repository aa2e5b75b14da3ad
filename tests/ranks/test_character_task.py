"""The character task on several ranks against one process, and across stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspeed.cli.app import run
from tests.support.character_runs import (
    character_config,
    character_tree,
    losses,
    register_characters,
    rows,
    train_characters,
)
from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.spawn import run_ranks

# Gradients are sums of the same numbers in another order: a few eps (1.2e-7) of them, in six steps.
LOSS = {"rel": 1e-6}
# Adam divides a gradient by its own size, so that a small one's rounding is a larger share of a step of 1e-3.
WEIGHTS = 1e-6

LAYOUTS = {
    "fsdp-2": (2, ("parallel.strategy=fsdp",)),
    "fsdp-4": (4, ("parallel.strategy=fsdp",)),  # packs of 6 and 2 over 4 ranks: fillers in each step
    "fsdp-2-accumulated": (2, ("parallel.strategy=fsdp", "train.micro_batch_size=1")),
    "ddp-2-accumulated": (2, ("parallel.strategy=ddp", "train.micro_batch_size=2")),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `small` of one process."""
    folder = tmp_path_factory.mktemp("characters")
    train_characters(str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_equal_one_process(home: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    run_ranks(train_characters, world, str(home), (f"name={layout}", *overrides))
    actual, one = character_config(home, f"name={layout}"), character_config(home)
    assert losses(actual) == pytest.approx(losses(one), **LOSS)
    for name in ("grad_norm", "tokens", "epoch"):
        assert [row[name] for row in rows(actual)] == pytest.approx([row[name] for row in rows(one)], rel=1e-5), name
    right = [[row["terms"]["right"] for row in rows(config)] for config in (actual, one)]
    assert right[0] == right[1]  # counts, which no order of sums changes
    validated = [[row["loss"] for row in rows(config, "validation")] for config in (actual, one)]
    assert validated[0] == pytest.approx(validated[1], **LOSS) and len(validated[0]) == 2
    state, truth = whole_checkpoint(actual.run_dir), whole_checkpoint(one.run_dir)
    for prefix in ("model.", "ema."):
        assert farthest(state, truth, prefix) < WEIGHTS


@pytest.mark.slow
def test_two_ranks_go_on_bitwise_after_any_step(home: Path) -> None:
    overrides = ("parallel.strategy=fsdp", "train.micro_batch_size=2")
    run_ranks(train_characters, 2, str(home), ("name=never-stopped", *overrides))
    run_ranks(train_in_parts, 2, str(home), overrides)
    parts, whole = (character_config(home, f"name={name}", *overrides) for name in ("stopped", "never-stopped"))
    assert losses(parts) == losses(whole)
    assert differing(whole_checkpoint(parts.run_dir), whole_checkpoint(whole.run_dir)) == []


def train_in_parts(folder: str, overrides: tuple[str, ...]) -> None:
    """A run that stops after each of its steps."""
    for steps in range(1, 7):
        train_characters(folder, ("name=stopped", f"train.steps={steps}", *overrides))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(home: Path) -> None:
    for world, steps in ((2, 2), (1, 4), (4, 6)):
        run_ranks(train_characters, world, str(home), ("name=changing", f"train.steps={steps}"))
    config = character_config(home, "name=changing")
    assert losses(config) == pytest.approx(losses(character_config(home)), **LOSS)
    assert (
        farthest(whole_checkpoint(config.run_dir), whole_checkpoint(character_config(home).run_dir), "model.") < WEIGHTS
    )


@pytest.mark.parametrize("layout", ["dp_shard=2", "strategy=ddp,dp_replicate=2"])
@pytest.mark.slow
def test_check_compares_a_layout_with_one_process(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register_characters()
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(character_tree(tmp_path)), encoding="utf-8")
    assert run(["check", str(file), "--parallel", layout]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "step: the 5 gradients of" in text
