"""Training with sparse attention on several ranks: the pipeline end to end, its thresholds, its checkpoints across layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mmspeed.log import read_metrics
from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow

SPARSE = (
    "model.arrangement=full",
    "model.depth=3",
    "model.sparse.min_tokens=8",
    "model.sparse.cluster_size=4",
    "model.sparse.dense_first=0",
    "model.sparse.keep=0.4",
    "model.sparse.dense_steps=1",
    "model.sparse.update_every=1",
    "train.batch_size=4",
    "train.steps=4",
    "validate.samples=0",
)
ULYSSES = ("parallel.ulysses=2",)
RING = ("parallel.ring=2", "memory.activation_policy={block: recompute}")


def train(folder: str, *runs: tuple[str, ...]) -> None:
    from mmspeed.pipelines import TrainPipeline

    for overrides in runs:
        TrainPipeline(small_config(Path(folder), *SPARSE, *overrides)).run()


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, one of two that share the data, and two of ranks that share a video."""
    folder = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("sparse") / "home"))
    run_ranks(train, 1, str(folder), ("name=one",))
    run_ranks(
        train,
        2,
        str(folder),
        ("name=fsdp", "memory.activation_policy={block: recompute}"),
        ("name=ulysses", *ULYSSES),
        ("name=ring", *RING),
        ("name=parts", "train.steps=2", *ULYSSES),
    )
    run_ranks(train, 1, str(folder), ("name=parts",))
    return folder


def last(home: Path, name: str) -> list[dict[str, Any]]:
    rows = read_metrics(small_config(home, f"name={name}").run_dir / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "train"][-1]["attention"]


@pytest.mark.parametrize("name", ["fsdp", "ulysses", "parts"])
def test_a_layout_trains_as_one_rank(home: Path, name: str) -> None:
    one = losses(small_config(home, *SPARSE, "name=one"))
    assert losses(small_config(home, *SPARSE, f"name={name}")) == pytest.approx(one, rel=2e-4)
    for layer, twin in zip(last(home, name), last(home, "one"), strict=True):
        for field in ("kept", "tau", "error"):
            assert layer[field] == pytest.approx(twin[field], rel=1e-3), (field, layer["layer"])


def test_ranks_of_a_ring_train_sparsely(home: Path) -> None:
    """Clusters are of a rank's queries, so the losses are near those of one rank, and not equal."""
    one = losses(small_config(home, *SPARSE, "name=one"))
    ring = losses(small_config(home, *SPARSE, "name=ring"))
    assert ring[0] == pytest.approx(one[0], rel=2e-4)  # the dense step
    assert ring == pytest.approx(one, rel=0.02)
    for layer in last(home, "ring"):
        assert layer["kept"] == pytest.approx(0.4, abs=0.2) and layer["tau"] > 0 and layer["error"] > 0
