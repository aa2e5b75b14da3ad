"""The training pipeline on two ranks against one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks

# Sums over samples are taken in another order on several ranks: float32 rounding, grown over a few steps of Adam.
TOLERANCE = {"rel": 2e-4}


def train(folder: str, overrides: tuple[str, ...]) -> None:
    from mmspeed.pipelines import TrainPipeline

    config = small_config(Path(folder), *overrides)
    TrainPipeline(config).run()


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, and the run `one` of one process."""
    folder = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("ranks") / "home"))
    run_ranks(train, 1, str(folder), ("name=one",))
    return folder


def test_two_sharded_ranks_equal_one_process(home: Path) -> None:
    """Batches of 3 over 2 ranks, the last of an epoch of 1: fillers and short batches are in it."""
    run_ranks(train, 2, str(home), ("name=fsdp", "train.micro_batch_size=1"))
    assert losses(small_config(home, "name=fsdp")) == pytest.approx(losses(small_config(home, "name=one")), **TOLERANCE)
