"""Ranks with other configs, code, data or weights are named before the first step, with the key in which they differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmspeed.pipelines.run import agreement
from tests.support.mismatches import (
    CASES,
    COVER,
    last,
    messages,
    require_named,
    train_small,
    train_toy_of,
    write_mismatches,
)
from tests.support.runs import small_config
from tests.support.spawn import run_ranks


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache, one of an equal index and another encoder, one of fewer samples, and two files of weights."""
    return write_mismatches(tmp_path_factory.mktemp("agreement"), small_cache)


@pytest.fixture(scope="module")
def two(home: Path) -> list[tuple[list[str], list[str]]]:
    return run_ranks(mismatches_and_weights, 2, str(home))


def mismatches_and_weights(home: str) -> tuple[list[str], list[str]]:
    return messages(home, list(COVER)), same_and_other_weights(home)


def test_kinds_of_mismatch_are_named(two: list[tuple[list[str], list[str]]]) -> None:
    """Each of these ended in other losses without a word, or in a hang."""
    require_named([rank[0] for rank in two], list(COVER))


@pytest.mark.slow
def test_every_kind_of_mismatch_is_named(home: Path) -> None:
    require_named(run_ranks(messages, 4, str(home), list(CASES)), list(CASES))


def same_and_other_weights(home: str) -> list[str]:
    """The outcomes of replicas with equal weights, and with others: DDP would take rank 0's without a word."""
    other = "other.safetensors" if last() else "weights.safetensors"
    return [train_toy_of(home, "weights.safetensors", "ddp"), train_toy_of(home, other, "ddp")]


def test_replicas_of_one_file_train_and_of_two_do_not(two: list[tuple[list[str], list[str]]]) -> None:
    first, second = (rank[1] for rank in two)
    assert first == second and first[0] == "", first
    assert "on rank 1 (" in first[1] and "model.blocks.0.up.weight is " in first[1] and "files of weights" in first[1]


def drawn_otherwise(home: str) -> list[str]:
    """The outcome of a rank that draws another value of one parameter, and of one that starts from another checkpoint."""
    from mmspeed.models.sora import model

    draw = model.initial_value
    if last():
        model.initial_value = lambda name, *rest: draw(name, *rest) + float(name == "patch_in.weight")
    results = [train_small(home, "name=drawn")]
    model.initial_value = draw
    for name, seed in (("start", 0), ("start-b", 1)):
        results.append(train_small(home, f"name={name}", f"seed={seed}"))
    for folder in ("a", "b"):
        if dist.get_rank() == 0:
            run = "start-b" if folder == "b" else "start"
            shutil.copytree(Path(home) / "runs" / run, Path(home) / folder / "start")
    dist.barrier()
    results.append(train_small(home, "name=onward", f"train.start_from={home}/{'b' if last() else 'a'}/start"))
    return results


@pytest.mark.slow
def test_drawn_values_and_starting_checkpoints_are_compared(home: Path) -> None:
    """Sharded ranks would each take their own part of two different models."""
    first, second = run_ranks(drawn_otherwise, 2, str(home))
    assert first == second and first[1:3] == ["", ""], first
    assert "on rank 1 (" in first[0] and "model.patch_in.weight is " in first[0], first[0]
    assert "on rank 1 (" in first[3] and "train.start_from is step-00000002 (" in first[3], first[3]


def mirrored(home: str, mirror: str) -> str:
    """The outcome of a rank 1 with a mirror of the cache and other numbers of workers."""
    own = [f"data.cache={mirror}", "train.prefetch=1", "preprocess.decode_workers=3"] if last() else []
    return train_small(home, "name=mirrored", *own)


@pytest.mark.slow
def test_paths_and_workers_may_differ_between_machines(home: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror" / "cache"
    shutil.copytree(small_config(home).cache_dir, mirror)
    assert run_ranks(mirrored, 2, str(home), str(mirror)) == ["", ""]


def test_a_tensor_of_any_type_has_a_fact() -> None:
    tensors = [torch.tensor(1.0), torch.zeros(0), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 3).T]
    assert len({agreement.tensor_fact(tensor) for tensor in tensors}) == 4
    assert agreement.tensor_fact(torch.ones(2, 3).T) == agreement.tensor_fact(torch.ones(3, 2))
