"""Runs of a published model that read its files: once where a budget measures first, and not what a checkpoint replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.config import Config, load_config
from mmspeed.models.diffusers.loading import RepositoryWeights
from mmspeed.pipelines import TrainPipeline
from mmspeed.protocols import Part
from tests.support.checkpoints import whole_checkpoint
from tests.support.covers import slow_but
from tests.unit.pipelines.test_export import config_of, home
from tests.unit.pipelines.test_fine_tuning import SMALL

__all__ = ["home"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each reading of files."""
    counts: list[int] = []
    read = RepositoryWeights.read

    def counted(self: RepositoryWeights, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        counts.append(len(parts))
        return read(self, parts)

    monkeypatch.setattr(RepositoryWeights, "read", counted)
    return counts


def with_its_texts(home: Path, name: str, *overrides: str) -> Config:
    """A config with the repository's own text encoder, whose captions are shorter than `text.max_tokens`."""
    rest = [each for each in SMALL if not each.startswith("text.")]
    changes = (f"name={name}", "data.cache=cache-of-family", "train.steps=2", "train.lr=1e-3")
    return load_config(home / "own.yaml", (*rest, *changes, *overrides))


@pytest.mark.slow
def test_a_budget_is_measured_without_the_files(home: Path, reads: list[int]) -> None:
    """And changes nothing of what is trained."""
    TrainPipeline(with_its_texts(home, "plain"), online=True).run()
    reads.clear()
    TrainPipeline(with_its_texts(home, "budget", "memory.budget=64MB")).run()
    assert (home / "runs" / "budget" / "memory.json").is_file()
    assert len(reads) == 1
    own, plain = (whole_checkpoint(home / "runs" / name) for name in ("budget", "plain"))
    assert own.keys() == plain.keys() and all(torch.equal(own[name], tensor) for name, tensor in plain.items())


def test_a_run_begins_with_the_weights_of_another(home: Path) -> None:
    """The average of a run, whose base is the same repository; one step with a rate of nearly zero leaves it as it is."""
    start = str(home / "runs" / "own")
    changes = (f"train.start_from={start}", "train.lr=1e-30", "train.steps=1", "train.weight_decay=0")
    TrainPipeline(config_of(home, "further", *changes)).run()
    began: dict[str, Any] = whole_checkpoint(home / "runs" / "further")
    averages = whole_checkpoint(home / "runs" / "own")
    for name, tensor in began.items():
        if name.startswith("model."):
            assert torch.equal(tensor, averages[f"ema.{name.removeprefix('model.')}"]), name


HALVES = {"split": ("memory.master=split",), "host": ("memory.master=host", "memory.states=host", "memory.ema=host")}


@pytest.mark.parametrize("tier", slow_but(HALVES, {"split"}))
def test_a_run_with_parts_in_float32_goes_on_as_one_never_stopped(home: Path, tier: str, reads: list[int]) -> None:
    """Some parameters are their own float32 masters beside those of bfloat16 ones. What goes on reads no weight of the base."""
    changes = ("device.dtype=bfloat16", *HALVES[tier])
    TrainPipeline(config_of(home, f"whole-{tier}", *changes)).run()
    TrainPipeline(config_of(home, f"parts-{tier}", *changes, "train.steps=1")).run()
    assert len(reads) == 2 and all(reads)
    TrainPipeline(config_of(home, f"parts-{tier}", *changes)).run()
    assert not any(reads[2:])
    whole, parts = (whole_checkpoint(home / "runs" / f"{name}-{tier}") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any(name.startswith("optimizer.") for name in whole)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
