"""Runs of adapters over processes: they learn what one process learns, beside the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspeed.loop.checkpoint.load import latest, open_checkpoint
from mmspeed.loop.checkpoint.storage import FROZEN
from mmspeed.pipelines import TrainPipeline
from tests.support.checkpoints import whole_checkpoint
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_adapter_memory import adapted, save_base

FSDP, HALF = "parallel.strategy=fsdp", ("device.dtype=bfloat16", "model.base.dtype=int8")
# name -> (processes, keys of the config, keys that one process has too)
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (2, ("parallel.strategy=ddp",), ()),
    "fsdp": (2, (FSDP,), ()),
    "fsdp of four": (4, (FSDP,), ()),
    "ulysses": (2, (FSDP, "parallel.ulysses=2"), ()),
    "ring": (2, (FSDP, "parallel.ring=2"), ()),
    "tp": (2, (FSDP, "parallel.tp=2"), ()),
    "base on the host": (2, (FSDP, "model.base.place=host"), ()),
    "int8": (2, (FSDP,), HALF),
    "int8 on the host": (1, ("model.base.place=host",), HALF),
}


def train(folder: Path, name: str, overrides: tuple[str, ...]) -> None:
    TrainPipeline(adapted(folder, name, *overrides)).run()


def outcome(folder: Path, name: str, overrides: tuple[str, ...]) -> tuple[list[float], dict[str, Any], str]:
    """The losses of a run, the tensors of its checkpoint, and the fingerprint of its base."""
    config = adapted(folder, name, *overrides)
    place = latest(config.run_dir / "checkpoints")
    assert place is not None
    return losses(config), whole_checkpoint(config.run_dir), open_checkpoint(place)[0][FROZEN]


def compare(folder: Path, name: str) -> None:
    world, own, shared = CASES[name]
    alone = f"one-{abs(hash(shared))}"
    if not (folder / "runs" / alone).exists():
        run_ranks(train, 1, folder, alone, ("parallel.strategy=auto", *shared))
    run_ranks(train, world, folder, name.replace(" ", "-"), (*own, *shared))
    (true, tensors, base), (found, others, kept) = (
        outcome(folder, run, keys) for run, keys in ((alone, shared), (name.replace(" ", "-"), (*own, *shared)))
    )
    tolerance = 1e-5 if not shared or world == 1 else 1e-2  # gathers round adapters to bfloat16
    assert found == pytest.approx(true, rel=tolerance) and kept == base
    assert others.keys() == tensors.keys() and any("lora_B" in key for key in tensors)
    means = [key for key in tensors if key.startswith("optimizer.") and "exp_avg" in key and "sq" not in key]
    largest = max(
        float(tensors[key].abs().max()) for key in means
    )  # of the gradients' means, which adapters of both kinds have
    apart = {key: float((others[key] - tensors[key]).abs().max()) / largest for key in means}
    assert any("lora_A" in key for key in means) and max(apart.values()) <= 10 * tolerance, apart


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_base(folder)
    return folder


def test_replicas_learn_what_one_process_learns(home: Path) -> None:
    compare(home, "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "ddp"])
def test_layouts_learn_what_one_process_learns(home: Path, name: str) -> None:
    compare(home, name)
