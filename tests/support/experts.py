"""Runs of both experts of a tiny Wan 2.2 A14B, on however many ranks call this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from mmspeed.config import Config, make_config
from mmspeed.loop.resting import held
from mmspeed.memory.offload.resting import HostRest
from mmspeed.parallel.tensor import local
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import Batch, Inputs, LearningPart
from tests.support.runs import small_tree

SEED = 5  # of whose first three steps two are of high noise and the third is of low noise


def experts_config(folder: Path, *overrides: str, **objective: Any) -> Config:
    """Three steps of both experts of `folder / "base"` on the demo clips."""
    tree = small_tree(folder, clips=5)
    del tree["vae"], tree["model"]
    # with AdamW's usual epsilon, gradients that are nothing but rounding move a weight as far as others do
    train = {"steps": 3, "batch_size": 2, "ema_decay": 0.9, "eps": 1e-4}
    return make_config(
        {
            **tree,
            "seed": SEED,
            "model": {"kind": "diffusers", "pretrained": str(folder / "base")},
            "objective": {"kind": "family", **(objective or {"experts": "both"})},
            "train": {**tree["train"], **train},
            "validate": {"every": 3, "samples": 1, "quantiles": 2, "report": False},
        },
        overrides,
        origin="test",
    )


class WatchedTask(VideoDomain):
    """The video task, which notes the times that each expert trains on."""

    def __init__(self, config: Config, maker: Any = None) -> None:
        super().__init__(config, maker)
        self.times: list[tuple[str, float, float]] = []  # of a step's micro-batches: expert, lowest and highest time

    def inputs(self, model: nn.Module, batch: Batch, part: LearningPart, *more: Any, **given: Any) -> Inputs:
        inputs = super().inputs(model, batch, part, *more, **given)
        time_I = inputs.tensors["time"]
        self.times.append((part.name, float(time_I.min()), float(time_I.max())))
        return inputs


def train_experts(folder: str, overrides: tuple[str, ...] = ()) -> None:
    """Train, with a first epoch where the cache is not complete."""
    TrainPipeline(experts_config(Path(folder), *overrides), online=True).run()


def train_whole_and_in_parts(folder: str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """The run `name`, and the run `name`-parts, which is stopped after two steps and goes on."""
    train_experts(folder, (f"name={name}", *overrides))
    for stop in ("train.steps=2", "train.steps=3"):
        train_experts(folder, (f"name={name}-parts", *overrides, stop))


def rested_and_plain_shards() -> tuple[list[list[float]], list[list[float]]]:
    """The weights of `rested_shards` with rest and without."""
    return rested_shards(True), rested_shards(False)


def rested_shards(rest: bool) -> list[list[float]]:
    """The weights of a sharded model after five steps, whole; with `rest` this process's parts lie elsewhere between the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    turns = HostRest(torch.device("cpu"), lambda: held(model, optimizer, None))
    for step in range(5):
        turns.wake()
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rest:
            turns.rest()
            assert all(local(p.detach()).untyped_storage().nbytes() == 0 for p in model.parameters())
    turns.wake()
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]
