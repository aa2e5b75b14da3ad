"""Ranks that were started with different configs or caches: named before the first step, and nothing is trained."""

from __future__ import annotations

import time
from pathlib import Path

from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.runs import small_config
from tests.support.spawn import run_ranks

SECONDS = 10.0  # to the message
OVERRIDES = (
    "train.lr=0.5",
    "seed=9",
    "train.batch_size=8",
    "train.steps=3",
    "checkpoint.every=1",
    "validate.every=5",
    "objective.timesteps=uniform",
    "device.dtype=bfloat16",
    "train.micro_batch_size=1",
    "name=another",
)


def message(folder: str, override: str) -> tuple[str, float]:
    """The error of a run whose last rank has an override of its own, "" without, and the seconds that it took."""
    import torch.distributed as dist

    from mmspeed.pipelines import TrainPipeline

    own = [override] if dist.get_rank() == dist.get_world_size() - 1 else []
    config = small_config(Path(folder), "train.steps=2", "validate.samples=0", *own)
    began = time.monotonic()
    try:
        TrainPipeline(config).run()
    except UserError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def messages(folder: str, overrides: list[str]) -> list[tuple[str, float]]:
    """`message` of each."""
    return [message(folder, override) for override in overrides]


@case("last rank with another config or cache", 200, 400)
def configs(scene: Scene) -> Outcome:
    CacheBuilder(small_config(scene.folder)).run()
    CacheBuilder(fewer := small_config(scene.folder / "fewer" / "small", clips=5)).run()
    overrides = [*scene.draw.sample(OVERRIDES, scene.count(4, len(OVERRIDES))), f"data.cache={fewer.cache_dir}"]
    named, tried, slowest = 0, 0, 0.0
    for world in (2, 4) if scene.full else (2,):
        by_rank = run_ranks(messages, world, str(scene.folder), overrides, timeout=90.0 * world)
        for number, override in enumerate(overrides):
            key = "data" if override.startswith("data.") else override.partition("=")[0]
            texts = {texts[number][0] for texts in by_rank}
            seconds = max(texts[number][1] for texts in by_rank)
            good = len(texts) == 1 and f"on rank {world - 1} (" in (text := texts.pop()) and f"{key} is " in text
            print(override, good, seconds, flush=True)
            named, tried, slowest = named + (good and seconds < SECONDS), tried + 1, max(slowest, seconds)
    return f"{named} of {tried} kinds named with rank and key, none trains; within {slowest:.1f} s", named == tried
