"""The language task with many techniques at once on 2 and 4 processes: bfloat16, tiers, budgets of memory, double rings, compiled blocks.

Tolerance: float32 rounding grown over three steps of Adam; in bfloat16, 8 bits of a logit's mantissa, averaged over a step's tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from tests.ranks.test_language_train import MODELS, config, home, rows
from tests.support.spawn import run_ranks

__all__ = ["home"]

FLOAT32, BFLOAT16 = 2e-5, 1e-3  # relative distances of losses
HALF = ("device.dtype=bfloat16", "memory.master=split")
HOST = ("device.dtype=bfloat16", "memory.master=host", "memory.states=host", "memory.ema=host")
RELEASED = ("device.dtype=bfloat16", "memory.master=float32", "memory.release_gradients=true", "train.clip_norm=null")


@dataclass(frozen=True)
class Together:
    """A model on a layout of so many processes, and what it does at once."""

    world: int
    model: str
    layout: tuple[str, ...]
    ways: tuple[str, ...] = ()
    budget: bool = False  # as little memory as will do

    @property
    def tolerance(self) -> float:
        return BFLOAT16 if "device.dtype=bfloat16" in self.ways else FLOAT32


CASES = {
    "ring, split, budget": Together(2, "dense", ("parallel.ring=2",), HALF, True),
    "ulysses, host, budget": Together(2, "latent", ("parallel.ulysses=2",), HOST, True),
    "tp, split, budget": Together(2, "dense", ("parallel.tp=2",), HALF, True),
    "fsdp, released": Together(2, "latent", (), (*RELEASED, "train.batch_size=2")),
    "ulysses, compiled, split": Together(2, "dense", ("parallel.ulysses=2",), (*HALF, "train.compile=true")),
    "latent double ring, split, budget": Together(
        4, "latent", ("parallel.ring=4", "parallel.ring_window=2"), HALF, True
    ),
    "ulysses x ring, host, budget": Together(4, "latent", ("parallel.ulysses=2", "parallel.ring=2"), HOST, True),
    "tp x ring, split": Together(4, "latent", ("parallel.tp=2", "parallel.ring=2"), HALF),
    "replicas x tp, split": Together(4, "dense", ("parallel.tp=2", "parallel.dp_replicate=2"), HALF),
}  # fmt: skip


def train(folder: str, name: str, overrides: tuple[str, ...], budget: bool) -> None:
    from mmspeed.pipelines import TrainPipeline

    def run(*more: str) -> None:
        TrainPipeline(config(Path(folder), f"name={name}", *overrides, *more)).run()

    if not budget:
        return run()
    least = 1.0  # MB
    for _ in range(6):  # what a step takes at least is known of its blocks first, then as measured
        try:
            return run(f"memory.budget={least:.1f}MB")
        except UserError as error:
            number = re.search(r"takes at least ([\d.]+) MB", str(error))
            assert number is not None, error
            least = float(number[1]) * 1.05
    raise AssertionError(f"no budget up to {least:.1f} MB will do")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(home: Path, name: str) -> None:
    """One process of the same precision, with everything kept, in one piece, on the device."""
    case = CASES[name]
    label = re.sub(r"\W+", "-", name)
    plain = tuple(way for way in case.ways if not way.startswith(("memory.", "train.compile")))
    run_ranks(train, 1, str(home), f"{label}-one", (*MODELS[case.model], *plain), False)
    run_ranks(train, case.world, str(home), label, (*MODELS[case.model], *case.layout, *case.ways), case.budget)
    one, several = rows(home, f"{label}-one"), rows(home, label)
    assert len(one) >= 4 and [tokens for _, tokens in several] == [tokens for _, tokens in one]
    assert [loss for loss, _ in several] == pytest.approx([loss for loss, _ in one], rel=case.tolerance)
    assert one[0][0] - one[2][0] > 100 * case.tolerance * one[0][0], "it moves by far more than the tolerance"
    if case.budget:
        policies = json.loads((config(home, f"name={label}").run_dir / "memory.json").read_text())
        assert "recompute" in json.dumps(policies), policies
