"""Training with videos split over ranks: the pipeline end to end, its checkpoints across layouts, its first epoch, its draws."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.pipelines.domains.video.data import VideoData
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.report.run_page import read_metrics
from mmspeed.preprocess import CacheBuilder, OnlineBuilder
from mmspeed.protocols import RunPlace
from tests.ranks.test_batching import mixed_config
from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow

TOLERANCE = {"rel": 2e-4}  # float32 rounding in another order, grown over a few steps of Adam

DSP = ("parallel.dsp=2",)
TENSOR = ("parallel.tp=2",)
FOUR = ("parallel.ring=2", "parallel.ulysses=2")
ALL = (
    "parallel.ring=2",
    "parallel.tp=2",
    "model.arrangement=full",
    "parallel.shard_text=2",
    "memory.activation_policy={block: recompute}",
)


def train(folder: str, mixed: bool, *runs: tuple[str, ...]) -> None:
    """Train each of these, one after the other."""
    from mmspeed.pipelines import TrainPipeline

    make: Callable[..., Config] = mixed_config if mixed else small_config
    for overrides in runs:
        config = make(Path(folder), *overrides)
        TrainPipeline(config).run()


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, and the run `one` of one rank."""
    folder = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("sequence") / "home"))
    run_ranks(train, 1, str(folder), False, ("name=one",))
    return folder


def test_layouts_of_two_four_and_one_rank_train_alike(home: Path) -> None:
    """One run never stopped on one rank, and one that goes 2 ranks (dsp), 4 (ring x ulysses), 2 (tp), 1."""
    run_ranks(train, 2, str(home), False, ("name=parts", "train.steps=2", *DSP))
    run_ranks(train, 4, str(home), False, ("name=parts", "train.steps=3", *FOUR))
    run_ranks(train, 2, str(home), False, ("name=parts", "train.steps=5", *TENSOR))
    run_ranks(train, 1, str(home), False, ("name=parts", "train.steps=6"))
    one = small_config(home, "name=one")
    assert_alike(small_config(home, "name=parts"), one)


def test_a_full_model_trains_over_a_ring_of_tensor_parallel_ranks(home: Path) -> None:
    run_ranks(train, 1, str(home), False, ("name=one-full", "model.arrangement=full"))
    run_ranks(train, 4, str(home), False, ("name=four-full", *ALL))
    full, four = small_config(home, "name=one-full"), small_config(home, "name=four-full")
    assert_alike(four, full)


def assert_alike(actual: Config, expected: Config) -> None:
    """Losses; and those of the averages, in the model, on held-out samples: each group computes its own."""
    assert losses(actual) == pytest.approx(losses(expected), **TOLERANCE)
    assert held_out(actual)[6] == pytest.approx(held_out(expected)[6], **TOLERANCE)


def held_out(config: Config) -> dict[int, float]:
    """The held-out losses by step."""
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "validation"}


def test_images_and_videos_of_one_step(tmp_path: Path) -> None:
    """Steps with buckets of both, of a number of samples that is the same in any world: 4 ranks take the steps of one."""
    fixed = ("batching.by=samples", "batching.mix=window", "train.batch_size=5", "train.steps=6")
    CacheBuilder(mixed_config(tmp_path, *fixed)).run()
    run_ranks(train, 1, str(tmp_path), True, ("name=one", *fixed))
    run_ranks(train, 4, str(tmp_path), True, ("name=groups", *fixed, *DSP), ("name=four", *fixed, *FOUR))
    expected = losses(mixed_config(tmp_path, "name=one", *fixed))
    for name in ("groups", "four"):
        assert losses(mixed_config(tmp_path, f"name={name}", *fixed)) == pytest.approx(expected, **TOLERANCE), name


class WatchedTask(VideoDomain):
    """Keeps the data that it made."""

    data_of_run: VideoData

    def data(self, place: RunPlace) -> VideoData:
        self.data_of_run = super().data(place)
        return self.data_of_run


def made_online(folder: str, overrides: tuple[str, ...]) -> tuple[int, int]:
    """Train on a cache that is not there; entries that this rank made, and all."""
    from mmspeed.pipelines import TrainPipeline

    config = small_config(Path(folder), *overrides)
    task = WatchedTask(config, OnlineBuilder(config))
    TrainPipeline(config, task=task).run()
    first = task.data_of_run.loader.first_epoch
    assert first is not None
    return first.encoded_here, first.encoded


@pytest.mark.parametrize("layout", [DSP, TENSOR], ids=["dsp", "tp"])
def test_a_group_shares_the_encoding_of_the_first_epoch(home: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Both ranks meet every video; each entry is made by one of them, and the losses are those of a cache made before."""
    (first, everything), (second, _) = run_ranks(made_online, 2, str(tmp_path), layout)
    assert first + second == everything == 16 and min(first, second) >= 6
    config = small_config(tmp_path, *layout)
    assert DatasetCache(config.cache_dir).duplicates == 0
    assert losses(config) == pytest.approx(losses(small_config(home, "name=one")), **TOLERANCE)
