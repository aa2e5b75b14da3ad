"""Ranks with other configs, code, data or weights are named before the first step, with the key in which they differ."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig
from mmspeed.data.cache.tables import read_info, write_info
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.run import agreement
from mmspeed.pipelines.tasks.video import VideoTask
from mmspeed.preprocess import CacheBuilder
from tests.support.runs import small_config
from tests.support.spawn import run_ranks
from tests.support.toy import ToyDiT
from tests.support.toy_runs import toy_config, write_toy_cache

SECONDS = 10.0  # from the first exchange to the message


@dataclass(frozen=True)
class Mismatch:
    """A kind of mismatch: what the last rank has otherwise, and the part of the message that names it."""

    override: str
    named: str


HOME = "HOME"  # in an override: the folder of the test's caches
CASES = {
    "lr": Mismatch("train.lr=0.5", "train.lr is 0.5, not 0.001"),
    "seed": Mismatch("seed=9", "seed is 9, not "),
    "batch size": Mismatch("train.batch_size=8", "train.batch_size is 8, not "),
    "steps": Mismatch("train.steps=3", "train.steps is 3, not 2"),
    "checkpoints": Mismatch("checkpoint.every=1", "checkpoint.every is 1, not "),
    "objective": Mismatch("objective.timesteps=uniform", "objective.timesteps is uniform, not logit_normal"),
    "number type": Mismatch("device.dtype=bfloat16", "device.dtype is bfloat16, not float32"),
    "layout": Mismatch("parallel.strategy=ddp", "parallel.strategy is ddp, not "),
    "encoder": Mismatch(f"data.cache={HOME}/encoder/cache", "encoders.vae.fingerprint is another, not "),
    "samples": Mismatch(f"data.cache={HOME}/fewer/cache", "data is "),
    "code": Mismatch("code", "mmspeed is "),
    "weights": Mismatch("weights", "model.blocks.0.up.weight is "),
}
COVER = ("lr", "steps", "layout", "encoder", "samples", "code", "weights")


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache, one of an equal index and another encoder, one of fewer samples, and two files of weights."""
    folder = tmp_path_factory.mktemp("agreement")
    shutil.copytree(small_cache / "cache", folder / "cache")
    shutil.copytree(small_cache / "cache", folder / "encoder" / "cache")
    info = read_info(folder / "encoder" / "cache")
    info["encoders"]["vae"]["fingerprint"] = "another"
    write_info(folder / "encoder" / "cache", info)
    CacheBuilder(small_config(folder / "fewer", clips=5)).run()
    toy = toy_config(folder / "toy")
    write_toy_cache(toy)
    weights = ToyDiT().state_dict()
    save_file(weights, folder / "weights.safetensors")
    weights["blocks.0.up.weight"][0, 0] += 2**-20
    save_file(weights, folder / "other.safetensors")
    return folder


def outcome(train: Callable[[], object]) -> str:
    """The error of a run, empty where there is none; not later than the limit."""
    began = time.monotonic()
    try:
        train()
    except UserError as error:
        assert time.monotonic() - began < SECONDS
        return str(error)
    return ""


def last() -> bool:
    """True on the last rank."""
    return dist.get_rank() == dist.get_world_size() - 1


def train_small(home: str, *overrides: str) -> str:
    """The outcome of a run in which this rank has its own overrides."""
    own = [override.replace(HOME, home) for override in overrides]
    config = small_config(Path(home), "train.steps=2", "validate.samples=0", *own)
    return outcome(lambda: TrainPipeline(config).run())


def train_toy_of(home: str, weights: str, strategy: str) -> str:
    """The outcome of a run whose model takes its weights from a file."""

    def build(section: ModelConfig, channels: int, text_width: int, device: str) -> nn.Module:
        model = ToyDiT()
        model.load_state_dict(load_file(Path(home) / weights))
        return model

    more = ("name=weights", "train.steps=2", "validate.samples=0", f"parallel.strategy={strategy}")
    config: Config = toy_config(Path(home) / "toy", *more)
    return outcome(lambda: TrainPipeline(config, task=VideoTask(config, build=build)).run())


def train_with_code(home: str, digest: str) -> str:
    """The outcome of a run of another checkout."""
    own = agreement.source_digest
    agreement.source_digest = lambda: digest  # type: ignore[assignment]
    try:
        return train_small(home)
    finally:
        agreement.source_digest = own


def messages(home: str, kinds: list[str]) -> list[str]:
    """The outcome of each kind of mismatch, which the last rank alone has."""
    found = []
    for kind in kinds:
        override = CASES[kind].override
        if kind == "weights":
            found.append(train_toy_of(home, "other.safetensors" if last() else "weights.safetensors", "auto"))
        elif kind == "code":
            found.append(train_with_code(home, "other" if last() else "same"))
        else:
            found.append(train_small(home, *([override] if last() else [])))
    return found


def require_named(by_rank: list[list[str]], kinds: list[str]) -> None:
    """All ranks end with one message, which names the last rank and the key."""
    assert all(found == by_rank[0] for found in by_rank)
    for kind, text in zip(kinds, by_rank[0], strict=True):
        assert f"on rank {len(by_rank) - 1} (" in text and CASES[kind].named in text, (kind, text)


def test_kinds_of_mismatch_are_named(home: Path) -> None:
    """Each of these ended in other losses without a word, or in a hang."""
    require_named(run_ranks(messages, 2, str(home), list(COVER)), list(COVER))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_mismatch_is_named(home: Path, world: int) -> None:
    require_named(run_ranks(messages, world, str(home), list(CASES)), list(CASES))


def same_and_other_weights(home: str) -> list[str]:
    """The outcomes of replicas with equal weights, and with others: DDP would take rank 0's without a word."""
    other = "other.safetensors" if last() else "weights.safetensors"
    return [train_toy_of(home, "weights.safetensors", "ddp"), train_toy_of(home, other, "ddp")]


def test_replicas_of_one_file_train_and_of_two_do_not(home: Path) -> None:
    first, second = run_ranks(same_and_other_weights, 2, str(home))
    assert first == second and first[0] == "", first
    assert "on rank 1 (" in first[1] and "model.blocks.0.up.weight is " in first[1] and "files of weights" in first[1]


def drawn_otherwise(home: str) -> list[str]:
    """The outcome of a rank that draws another value of one parameter, and of one that starts from another checkpoint."""
    from mmspeed.models.sora import model

    draw = model.initial_value
    if last():
        model.initial_value = lambda name, *rest: draw(name, *rest) + float(name == "patch_in.weight")
    found = [train_small(home, "name=drawn")]
    model.initial_value = draw
    for name, seed in (("start", 0), ("start-b", 1)):
        found.append(train_small(home, f"name={name}", f"seed={seed}"))
    for folder in ("a", "b"):
        if dist.get_rank() == 0:
            run = "start-b" if folder == "b" else "start"
            shutil.copytree(Path(home) / "runs" / run, Path(home) / folder / "start")
    dist.barrier()
    found.append(train_small(home, "name=onward", f"train.start_from={home}/{'b' if last() else 'a'}/start"))
    return found


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


def test_paths_and_workers_may_differ_between_machines(home: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror" / "cache"
    shutil.copytree(small_config(home).cache_dir, mirror)
    assert run_ranks(mirrored, 2, str(home), str(mirror)) == ["", ""]


def test_a_tensor_of_any_type_has_a_fact() -> None:
    tensors = [torch.tensor(1.0), torch.zeros(0), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 3).T]
    assert len({agreement.tensor_fact(tensor) for tensor in tensors}) == 4
    assert agreement.tensor_fact(torch.ones(2, 3).T) == agreement.tensor_fact(torch.ones(3, 2))
