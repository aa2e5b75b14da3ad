"""The training pipeline on several ranks against one process, and across changes of their number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mmspeed.pipelines import TextToVideo
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


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    pipe = TextToVideo.from_run(small_config(folder, f"name={name}").run_dir, weights="model")
    return dict(pipe.model.named_parameters())


@pytest.mark.slow
def test_one_two_and_four_ranks_end_with_the_same_parameters(home: Path) -> None:
    """Batches of 3: over 4 ranks one rank always has a filler. Steps of Adam are about 1e-3, rounding is 1e-7."""
    for world in (1, 2, 4):
        run_ranks(train, world, str(home), (f"name=world-{world}",))
    expected = weights(home, "world-1")
    for world in (2, 4):
        actual = weights(home, f"world-{world}")
        for name, parameter in expected.items():
            assert torch.allclose(actual[name], parameter, rtol=0, atol=5e-6), (world, name)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(home: Path) -> None:
    whole = small_config(home, "name=one")
    parts = small_config(home, "name=changing")
    for world, steps in ((2, 2), (1, 4), (2, 6)):
        run_ranks(train, world, str(home), ("name=changing", f"train.steps={steps}"))
    assert len(losses(parts)) == 6
    assert losses(parts) == pytest.approx(losses(whole), **TOLERANCE)


@pytest.mark.slow
def test_ddp_equals_one_process_and_resumes_bitwise(home: Path) -> None:
    run_ranks(train, 2, str(home), ("name=ddp", "parallel.strategy=ddp"))
    whole = losses(small_config(home, "name=ddp"))
    for steps in (3, 6):
        run_ranks(train, 2, str(home), ("name=ddp-parts", "parallel.strategy=ddp", f"train.steps={steps}"))
    assert losses(small_config(home, "name=ddp-parts")) == whole
    assert whole == pytest.approx(losses(small_config(home, "name=one")), **TOLERANCE)
