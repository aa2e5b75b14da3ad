"""Ranks that are started with something that differs, and what becomes of their run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig
from mmspeed.data.cache.tables import read_info, write_info
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.run import agreement
from mmspeed.preprocess import CacheBuilder
from tests.support.runs import small_config
from tests.support.toy import ToyDiT
from tests.support.toy_runs import toy_config, write_toy_cache


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


def write_mismatches(folder: Path, small_cache: Path) -> Path:
    """Fill a folder with a cache, one of an equal index and another encoder, one of fewer samples, and two files of weights."""
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
    """The error of a run, empty where there is none."""
    try:
        train()
    except UserError as error:
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
    return outcome(lambda: TrainPipeline(config, task=VideoDomain(config, build=build)).run())


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
    results = []
    for kind in kinds:
        override = CASES[kind].override
        if kind == "weights":
            results.append(train_toy_of(home, "other.safetensors" if last() else "weights.safetensors", "auto"))
        elif kind == "code":
            results.append(train_with_code(home, "other" if last() else "same"))
        else:
            results.append(train_small(home, *([override] if last() else [])))
    return results


def require_named(by_rank: list[list[str]], kinds: list[str]) -> None:
    """All ranks end with one message, which names the last rank and the key."""
    assert all(error == by_rank[0] for error in by_rank)
    for kind, text in zip(kinds, by_rank[0], strict=True):
        assert f"on rank {len(by_rank) - 1} (" in text and CASES[kind].named in text, (kind, text)
