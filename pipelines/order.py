"""What meets in which step of a run, and a process's share of it."""

from __future__ import annotations

from mmspeed.config import Config
from mmspeed.data import (
    MEASURED_NAME,
    Batching,
    BatchSampler,
    DatasetCache,
    Loader,
    SampleCosts,
    make_batching,
    make_stages,
    sample_costs,
)
from mmspeed.device import Device
from mmspeed.log import get_logger
from mmspeed.models import SoraDiT
from mmspeed.parallel import Strategy
from mmspeed.pipelines.profile import load_measured, setting_of
from mmspeed.shapes import Strides

log = get_logger("train")


def batching_of(
    config: Config,
    cache: DatasetCache,
    bare: SoraDiT,
    strides: Strides,
    device: Device,
    strategy: Strategy,
    world: int,
    rank: int,
) -> tuple[Batching, SampleCosts]:
    """How many samples of each bucket make a step, and what a sample costs."""
    costs = sample_costs(bare, strides, config.text.max_tokens)
    measured = None
    if config.batching.by == "time":  # what `mmspeed bench buckets` left in the run's folder
        setting = setting_of(config, bare, strides, device, strategy, world)
        measured, told = load_measured(config.run_dir / MEASURED_NAME, setting)
        if told and rank == 0:
            log.warning(told)
    buckets = cache.split("train").buckets()
    return make_batching(
        config.batching, config.train, buckets, costs, world, config.parallel, measured=measured
    ), costs


def make_order(
    config: Config, cache: DatasetCache, batching: Batching, device: Device, world: int, rank: int
) -> tuple[BatchSampler, Loader]:
    """The order of the run's steps, and who loads this process's share of them."""
    train = cache.split("train")
    sampler = BatchSampler(train, batching, seed=config.seed, stages=make_stages(config.data, config.curriculum))
    loader = Loader(
        cache,
        sampler,
        rank=rank,
        world=world,
        seed=config.seed,
        caption_dropout=config.train.caption_dropout,
        prefetch=config.train.prefetch,
        workers=config.train.loader_workers,
        device=device,
    )
    return sampler, loader
