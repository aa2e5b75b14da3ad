"""Biases of experts on two processes are those of one: replicas that see other tokens, and processes that share a pack.

A step of three packs is short for two replicas, one of which computes a filler. Losses agree to 1e-5, since sums are taken in another
order; biases agree exactly, as no load is near the mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspeed.log import read_metrics
from mmspeed.models.language.experts import Router
from mmspeed.pipelines import TrainCallback, TrainPipeline
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_expert_balance import EXPERTS
from tests.unit.pipelines.test_language_task import MemoryTask, config

LAYOUTS = {
    "one": (),
    "ddp": ("parallel.strategy=ddp",),
    "ulysses": ("parallel.ulysses=2",),
    "fsdp, tp, recomputed": ("parallel.tp=2", "parallel.strategy=fsdp", "memory.activation_policy={block: recompute}"),
}


class Last(TrainCallback):
    """The biases after the last step, as lists."""

    biases: dict[str, list[float]]

    def on_step(self, event: Any) -> None:
        model = getattr(event.models["model"], "module", event.models["model"])
        routers = {name: part for name, part in model.named_modules() if isinstance(part, Router)}
        self.biases = {name: part.e_score_correction_bias.tolist() for name, part in routers.items()}


def trained(
    folder: str, names: list[str], overrides: tuple[str, ...] = ("train.micro_batch_size=1",)
) -> dict[str, Any]:
    """(biases, losses, highest loads, auxiliary losses) of a run on each layout."""
    results = {}
    for name in names:
        home, last = Path(folder) / name, Last()
        settings = config(home, *EXPERTS, "train.lr=0.002", *overrides, *LAYOUTS[name])
        TrainPipeline(settings, task=MemoryTask(settings), callbacks=[last]).run()
        rows = [row for row in read_metrics(home / "run" / "metrics.jsonl") if row["kind"] == "train"]
        highest, balances = ([row["expert_load"]["max"] for row in rows], [row["terms"].get("balance") for row in rows])
        results[name] = (last.biases, [row["loss"] for row in rows], highest, balances)
    return results


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(trained, 1, str(tmp_path_factory.mktemp("one")), ["one"])[0]["one"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["ddp", "ulysses"], ["fsdp, tp, recomputed"]],
    ids=str,
)
def test_two_processes_have_the_biases_of_one(one: Any, tmp_path: Path, names: list[str]) -> None:
    first, second = run_ranks(trained, 2, str(tmp_path), names)
    for name in names:
        biases, losses, highest, _ = first[name]
        assert biases == second[name][0] == one[0], name
        assert losses == pytest.approx(one[1], rel=1e-5) and highest == pytest.approx(one[2]), name
        assert all(any(values) for values in biases.values()) and len(biases) == 2


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["global_batch", "micro_batch", "sequence"])
def test_an_auxiliary_loss_on_two_processes_is_that_of_one(tmp_path: Path, balance: str) -> None:
    """Statistics of one micro-batch of four packs on each process are those of the whole step, in every layout.

    Replicas see micro-batches of their own, and so have another loss where its statistics are of the micro-batch.
    """
    overrides = (f"model.balance={balance}", "objective.balance=1", "train.batch_size=4", "train.micro_batch_size=4")
    names = [name for name in LAYOUTS if name != "one" and (name != "ddp" or balance != "micro_batch")]
    (one,) = run_ranks(trained, 1, str(tmp_path), ["one"], overrides)
    first, second = run_ranks(trained, 2, str(tmp_path), names, overrides)
    for name in names:
        assert first[name][3] == second[name][3] == pytest.approx(one["one"][3], rel=1e-5), name
        assert first[name][1] == pytest.approx(one["one"][1], rel=1e-5), name
    assert all(value > 2 for value in one["one"][3])  # of two blocks with experts, 1 each at even loads
