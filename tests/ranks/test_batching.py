"""Elastic resume of training with mixed buckets: what meets in steps, and what is drawn for each use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mmspeed.config import Config, make_config
from mmspeed.data.cache.keys import digest
from mmspeed.preprocess import CacheBuilder
from mmspeed.protocols import Batch
from tests.support.media import write_image
from tests.support.runs import losses, small_tree
from tests.support.spawn import run_ranks

BUCKETS = [(1, 32, 48), (5, 32, 48), (9, 32, 48), (5, 48, 32)]
Name = tuple[str, int, int]


def mixed_config(folder: Path, *overrides: str) -> Config:
    """10 clips, each in two buckets of the three of videos, and 9 images."""
    tree = small_tree(folder, clips=10)
    pictures = folder / "pictures"
    if not pictures.exists():
        pictures.mkdir()
        for number in range(9):
            write_image(pictures / f"{number}.png", number=number)
            (pictures / f"{number}.txt").write_text(f"picture {number}", encoding="utf-8")
    tree["data"] |= {
        "sources": [*tree["data"]["sources"], {"path": str(pictures), "name": "pictures"}],
        "buckets": [dict(zip(("frames", "height", "width"), bucket, strict=True)) for bucket in BUCKETS],
        "buckets_per_clip": 2,
    }
    tree["train"] |= {"steps": 30, "batch_size": None, "caption_dropout": 0.3}
    tree["batching"] = {"by": "flops", "mix": "window"}
    tree["validate"] |= {"every": 100}
    return make_config(tree, overrides, origin="test")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    CacheBuilder(mixed_config(folder)).run()
    return folder


def train_some(folder: str, overrides: tuple[str, ...], stop_at: int | None) -> list[dict[str, Any]]:
    """Train, writing down what meets in every step, and what was drawn for each use; `stop_at` a step stops there and saves."""
    from mmspeed.loop.step import StepResult
    from mmspeed.pipelines import TrainPipeline
    from mmspeed.pipelines.domains.video.domain import VideoDomain
    from mmspeed.pipelines.training.trainer import Run
    from mmspeed.protocols import Inputs, StepData

    config = mixed_config(Path(folder), *overrides)
    written: list[dict[str, Any]] = []

    class Written(TrainPipeline):
        def _step(self, run: Run, data: StepData) -> StepResult | None:
            written.append({"step": [item.name for item in data.items], "epoch": data.items[0].epoch, "drawn": {}})
            if stop_at is not None and len(written) == stop_at:
                (self.folder.root / "stop").touch()
            return super()._step(run, data)

    class WrittenTask(VideoDomain):
        def inputs(self, model: nn.Module, batch: Batch, *more: Any, **given: Any) -> Inputs:
            for place, name in enumerate(batch.names):
                if batch.weights_I[place]:
                    tensors = (batch["latents"][place], batch["noise"][place], batch["quantiles"][place])
                    text = batch["text"][place][batch["text_mask"][place]]
                    written[-1]["drawn"][name] = digest(b"".join(t.numpy().tobytes() for t in (*tensors, text)))
            return super().inputs(model, batch, *more, **given)

    Written(config, task=WrittenTask(config)).run()
    return written


def uses(steps: list[dict[str, Any]], epoch: int) -> list[Name]:
    return sorted(name for step in steps if step["epoch"] == epoch for name in step["step"])


def drawn(ranks: list[list[dict[str, Any]]]) -> dict[Name, str]:
    return {name: value for steps in ranks for step in steps for name, value in step["drawn"].items()}


@pytest.mark.slow
def test_resume_on_another_number_of_ranks_goes_on_with_exactly_the_rest(home: Path) -> None:
    """Steps are chosen by the world size here: 1 rank, stopped in the middle of an epoch, then 2 ranks, then 1 again.

    Every use of the epoch comes once, with the latent, noise, timestep and caption that it has on one rank never stopped.
    """
    (whole,) = run_ranks(train_some, 1, str(home), ("name=whole",), None)
    epochs = [step["epoch"] for step in whole]
    assert epochs.count(0) >= 6 and max(epochs) >= 1, "steps for this test"
    (first,) = run_ranks(train_some, 1, str(home), ("name=elastic",), 2)
    second = run_ranks(train_some, 2, str(home), ("name=elastic",), 1)
    (third,) = run_ranks(train_some, 1, str(home), ("name=elastic",), None)
    assert (len(first), len(second[0]), len(third)) == (2, 1, 27)
    assert second[0][0]["step"] == second[1][0]["step"] and len(second[0][0]["step"]) > len(first[0]["step"])
    parts = [*first, *second[0], *third]
    assert uses(parts, 0) == uses(whole, 0) and len(set(uses(parts, 0))) == len(uses(parts, 0))
    expected, actual = drawn([whole]), drawn([first, *second, third])
    common = expected.keys() & actual.keys()
    assert set(uses(whole, 0)) <= common and all(actual[name] == expected[name] for name in common)


@pytest.mark.slow
def test_with_fixed_slots_another_number_of_ranks_is_the_same_run(home: Path) -> None:
    """`batching.slots` fixes what meets in a step: 1 rank, 2 ranks, and 2 ranks resumed on 1 have the same losses."""
    fixed = ("batching.slots=4", "train.steps=8", "batching.mix=same")
    (one,) = run_ranks(train_some, 1, str(home), ("name=fixed-1", *fixed), None)
    two = run_ranks(train_some, 2, str(home), ("name=fixed-2", *fixed), None)
    stopped = run_ranks(train_some, 2, str(home), ("name=fixed-3", *fixed), 3)
    (rest,) = run_ranks(train_some, 1, str(home), ("name=fixed-3", *fixed), None)
    assert [s["step"] for s in one] == [s["step"] for s in two[0]] == [s["step"] for s in [*stopped[0], *rest]]
    expected = losses(mixed_config(home, "name=fixed-1"))
    for name in ("fixed-2", "fixed-3"):
        assert losses(mixed_config(home, f"name={name}")) == pytest.approx(expected, rel=2e-4)
    assert json.loads((mixed_config(home, "name=fixed-3").run_dir / "run.json").read_text())["parameters"] > 0
