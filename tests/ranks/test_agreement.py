"""Ranks with other configs, code or data are named before the first step, with the key in which they differ."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from tests.support.runs import small_config
from tests.support.spawn import run_ranks

SECONDS = 10.0  # from the first exchange to the message


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of 16 samples, and one beside it with another text encoder."""
    folder = tmp_path_factory.mktemp("agreement")
    CacheBuilder(small_config(folder)).run()
    return folder


def message(folder: str, overrides: Mapping[int, tuple[str, ...]]) -> str:
    """The error of a run in which each rank adds its own overrides; empty where there is none."""
    import torch.distributed as dist

    from mmspeed.pipelines import TrainPipeline

    config = small_config(Path(folder), "train.steps=2", "validate.samples=0", *overrides.get(dist.get_rank(), ()))
    began = time.monotonic()
    try:
        TrainPipeline(config).run()
    except UserError as error:
        assert time.monotonic() - began < SECONDS
        return str(error)
    return ""


CASES = [
    ("train.lr=0.5", "train.lr is 0.5, not 0.001"),
    ("seed=9", "seed is 9, not "),
    ("train.batch_size=8", "train.batch_size is 8, not "),
    ("train.steps=3", "train.steps is 3, not 2"),
    ("checkpoint.every=1", "checkpoint.every is 1, not "),
    ("objective.timesteps=uniform", "objective.timesteps is uniform, not logit_normal"),
    ("device.dtype=bfloat16", "device.dtype is bfloat16, not float32"),
    ("name=another", "name is another, not "),
]


def all_messages(folder: str, cases: list[str]) -> list[str]:
    """The error of each case, whose override only rank 1 has."""
    return [message(folder, {1: (case,)}) for case in cases]


def test_a_rank_with_another_config_is_named_with_the_key(home: Path) -> None:
    """Each of these ended in other losses without a word, or in a hang."""
    first, second = run_ranks(all_messages, 2, str(home), [case for case, _ in CASES])
    assert first == second
    for (case, part), text in zip(CASES, first, strict=True):
        assert "on rank 1 (" in text and part in text, (case, text)


def test_a_rank_with_another_cache_is_named(home: Path, tmp_path: Path) -> None:
    """Fewer samples of the same data, in a cache under the same name."""
    shutil.copytree(home, tmp_path / "few")
    fewer = small_config(tmp_path / "few" / "other", clips=5)
    CacheBuilder(fewer).run()
    moved = {1: (f"data.cache={fewer.cache_dir}",)}
    first, second = run_ranks(message, 2, str(home), moved)
    assert first == second and "on rank 1 (" in first and "data is " in first and "the same data" in first


def test_paths_and_workers_may_differ_between_machines(home: Path, tmp_path: Path) -> None:
    """A mirror of the cache at another place, and other numbers of workers, change nothing."""
    mirror = tmp_path / "mirror" / "cache"
    shutil.copytree(small_config(home).cache_dir, mirror)
    local = {1: (f"data.cache={mirror}", "train.prefetch=1", "preprocess.decode_workers=3", "name=mirrored")}
    assert run_ranks(message, 2, str(home), {0: ("name=mirrored",), **local}) == ["", ""]
