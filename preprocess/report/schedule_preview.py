"""Forecast the schedule of a training for any number of devices, from counts of samples alone."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.config import Config
from mmspeed.config.training import Weighting
from mmspeed.data import Batching
from mmspeed.data.sampling.assignment import BucketBatch, assign_slots
from mmspeed.data.sampling.batch_sizes import Measured, SampleCosts, make_batching, make_stages
from mmspeed.data.sampling.forecast import Forecast, forecast
from mmspeed.data.sampling.mixture import SamplePool, over_largest
from mmspeed.data.sampling.order import Order, TrainingStage
from mmspeed.data.sampling.schedule import EpochSchedule
from mmspeed.data.sampling.weighting import gradient_shares
from mmspeed.device import devices_here
from mmspeed.errors import UserError
from mmspeed.preprocess.records.caption_lengths import CaptionLengths
from mmspeed.protocols import ShapeClass

Array = npt.NDArray[Any]
POINTS = 200  # of a curve
UNITS = {"samples": "TFLOP", "tokens": "tokens", "flops": "TFLOP", "time": "s"}  # of a cost, by batching.by


@dataclass(frozen=True)
class BucketPreview:
    """The use of a bucket in an epoch of a stage. Tuples have an entry for each number of devices."""

    bucket: ShapeClass
    samples: int
    uses: int  # of samples, in an epoch
    tokens: int  # of a sample
    cost: float  # of a sample alone, in the outlook's unit
    share: float  # of an epoch's cost
    gradient: tuple[float, ...]  # share of an epoch's gradients, by the config's weighting
    step: tuple[int, ...]  # samples of a full step
    at_a_time: tuple[int, ...]  # the most of them that one device computes together


@dataclass(frozen=True)
class DatasetPreview:
    """The use of a data set in an epoch of a stage."""

    name: str
    samples: int
    uses: int
    asked: float  # its share of the uses, by the config
    share: float  # the actual share, of whole uses of the existing samples
    gradient: tuple[float, ...]  # share of an epoch's gradients, for each number of devices
    epochs: int  # within which each of its samples was used


@dataclass(frozen=True)
class Curve:
    """The steps of an epoch as points; each stands for consecutive steps, and shows the costliest of them."""

    steps: Array  # (points + 1): point i is of the steps [steps[i], steps[i + 1])
    mean: Array  # cost of that step, mean over ranks
    greatest: Array  # of the rank with the most
    imbalance: Array  # the largest of all these steps
    share_PB: Array  # (points, buckets): shares of these steps' cost


@dataclass(frozen=True)
class EpochPreview:
    """The first epoch of a stage on `world` devices, and the totals of the stage. Imbalance is greatest over mean, at best 1."""

    world: int
    steps: int
    samples: int
    tokens: int
    micro_batches: float  # of a rank in a step, mean
    mean_imbalance: float  # over steps
    worst_imbalance: float  # of a step
    epoch_imbalance: float  # of the epoch's time
    idle: int  # micro-batches of weight 0
    mixed: int  # steps of several buckets
    short: int  # steps of less than 9 tenths of the median's cost
    left_out: int  # uses in no step
    padding: float | None  # share of caption tokens that are padding; None: lengths are unknown
    trained: int  # steps of the whole training
    unmet: int  # uses of the last epoch that training does not reach
    total_samples: int  # of the stage over the whole training, as are the following fields
    total_tokens: int
    total_flops: float
    curve: Curve

    @property
    def epochs(self) -> float:
        """Epochs of the stage in training."""
        return self.trained / self.steps


@dataclass(frozen=True)
class StagePreview:
    """The forecast of a stage of training; without a curriculum there is one stage."""

    number: int
    begin: int  # its first step
    end: int  # after its last; equal to `begin` for a stage that training does not reach
    buckets: tuple[BucketPreview, ...]
    datasets: tuple[DatasetPreview, ...]
    epochs: tuple[EpochPreview, ...]  # one for each number of devices


@dataclass(frozen=True)
class SchedulePreview:
    """The forecast of a config's training on each number of devices in `worlds`."""

    worlds: tuple[int, ...]
    unit: str  # of costs
    weighting: Weighting
    lockstep: bool  # True: ranks synchronise in every micro-batch (sharded parameters); False: once a step (ddp)
    stages: tuple[StagePreview, ...]

    def total(self, what: Callable[[EpochPreview], float]) -> tuple[float, ...]:
        """The sum of `what` over all stages, for each number of devices."""
        return tuple(sum(what(stage.epochs[place]) for stage in self.stages) for place in range(len(self.worlds)))

    @property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of the whole training, for each number of devices."""
        return self.total(lambda epoch: epoch.total_flops)


def usual_worlds(config: Config) -> tuple[int, ...]:
    """The default number of devices to show: those of this machine, or as many as the layout needs."""
    return (devices_here(config.device.kind, config.parallel.group),)


def preview_schedule(
    config: Config,
    groups: Mapping[tuple[ShapeClass, str], int],
    costs: SampleCosts,
    worlds: Sequence[int] | None = None,
    measured: Measured | None = None,
    captions: CaptionLengths | None = None,
) -> SchedulePreview:
    """Forecast the schedule of a config.

    Args:
        groups: the number of training samples of each (bucket, data set).
        costs: the costs of one sample, by the model's own count.
        worlds: numbers of devices; None: those of this machine.
        measured: measurements, for `batching.by: time`.
        captions: distribution of lengths, for the share of padding.

    Raises UserError if a stage has no samples, or a bucket was not measured.
    """
    worlds = worlds or usual_worlds(config)
    costs = SampleCosts(functools.cache(costs.tokens), functools.cache(costs.flops))  # called for every step
    sizes = {group: count for group, count in groups.items() if count}
    places = {group: np.arange(count, dtype=np.int32) for group, count in sizes.items()}
    stages = make_stages(config.data, config.curriculum)
    plans: list[tuple[Batching, Order]] = []
    for world in worlds:
        buckets = {bucket for bucket, _ in sizes}
        if world % config.parallel.group:
            raise UserError(
                f"{world} devices are not a multiple of the {config.parallel.group} of {config.parallel.group_in_words()}"
            )
        batching = make_batching(
            config.batching, config.train, buckets, costs, world, config.parallel, measured=measured
        )
        same_order = next((order for other, order in plans if other == batching), None)  # then its plans are the same
        plans.append((batching, same_order or Order(places, batching, config.seed, stages)))
    lockstep = config.parallel.strategy != "ddp"
    starts = [0, *itertools.accumulate(stage.steps or 0 for stage in stages[:-1])]
    ends = [*starts[1:], config.train.steps]
    previews = []
    gradients = _GradientShares(config.weighting, costs)
    for number, stage in enumerate(stages):
        stage_sizes = dict.fromkeys(config.data.dataset_names, 0)
        for (bucket, name), count in sizes.items():
            stage_sizes[name] += count if stage.takes(bucket) else 0
        begin, end = (min(step, config.train.steps) for step in (starts[number], ends[number]))
        epochs = [
            _epoch(number, begin, end, world, *plan, costs, lockstep, captions)
            for world, plan in zip(worlds, plans, strict=True)
        ]
        shares = [gradients.of(order, number, begin) for _, order in plans]
        previews.append(
            StagePreview(
                number,
                begin,
                end,
                _buckets(number, worlds, plans, costs, shares),
                _datasets(
                    stage,
                    [pool for of in plans[0][1].pools[number].values() for pool in of],
                    stage_sizes,
                    {order.locate(begin).epoch for _, order in plans},
                    shares,
                ),
                tuple(epochs),
            )
        )
    return SchedulePreview(tuple(worlds), UNITS[config.batching.by], config.weighting, lockstep, tuple(previews))


class _GradientShares:
    """The shares of buckets in the gradients of a stage's first epoch, computed once for each order."""

    def __init__(self, weighting: Weighting, costs: SampleCosts) -> None:
        self.weighting, self.costs = weighting, costs
        self._known: dict[tuple[int, int, int], dict[ShapeClass, float]] = {}

    def of(self, order: Order, stage: int, begin: int) -> dict[ShapeClass, float]:
        """The share of each bucket in the epoch that begins with step `begin`."""
        epoch = order.locate(begin).epoch
        if (id(order), stage, epoch) not in self._known:
            plan, buckets = order.whole_epoch(stage, epoch)
            self._known[id(order), stage, epoch] = gradient_shares(plan, buckets, self.weighting, self.costs.tokens)
        return self._known[id(order), stage, epoch]


def _epoch(
    stage: int,
    begin: int,
    end: int,
    world: int,
    batching: Batching,
    order: Order,
    costs: SampleCosts,
    lockstep: bool,
    captions: CaptionLengths | None,
) -> EpochPreview:
    first = order.locate(begin).epoch
    plan, buckets = order.whole_epoch(stage, first)
    uses = [sum(pool.uses for pool in order.pools[stage][bucket]) for bucket in buckets]
    epoch_forecast = forecast(plan, buckets, batching, world, order.uses(stage), costs.tokens)
    imbalance = epoch_forecast.lockstep if lockstep else epoch_forecast.window
    turns, rest = divmod(end - begin, plan.steps)
    total_uses_by_bucket = np.array(uses) * turns
    if rest:
        last, _ = order.whole_epoch(stage, first + turns)
        total_uses_by_bucket += last.used(rest, len(buckets))
    parts = [(count, full_step(batching, bucket, count, world)[1]) for bucket, count in zip(buckets, uses, strict=True)]
    return EpochPreview(
        world=world,
        steps=epoch_forecast.steps,
        samples=epoch_forecast.samples,
        tokens=epoch_forecast.tokens,
        micro_batches=float(epoch_forecast.rows.mean()),
        mean_imbalance=float(imbalance.mean()),
        worst_imbalance=float(imbalance.max()),
        epoch_imbalance=float((imbalance * epoch_forecast.cost).sum() / epoch_forecast.cost.sum()),
        idle=epoch_forecast.idle,
        mixed=epoch_forecast.mixed,
        short=epoch_forecast.short,
        left_out=epoch_forecast.unmet,
        padding=None if captions is None else captions.padding(parts),
        trained=end - begin,
        unmet=int(sum(uses) * (turns + 1) - total_uses_by_bucket.sum()) if rest else 0,
        total_samples=int(total_uses_by_bucket.sum()),
        total_tokens=sum(
            int(n) * costs.tokens(bucket) for n, bucket in zip(total_uses_by_bucket, buckets, strict=True)
        ),
        total_flops=sum(
            float(n) * costs.flops(bucket) for n, bucket in zip(total_uses_by_bucket, buckets, strict=True)
        ),
        curve=draw_curve(plan, epoch_forecast, imbalance, [batching.cost(bucket).each for bucket in buckets]),
    )


def full_step(batching: Batching, bucket: ShapeClass, uses: int, world: int) -> tuple[int, int]:
    """Samples of a step of a single bucket (fewer if it has fewer uses), and the most that a device computes together."""
    count = min(uses, batching.supply(bucket, uses).step)
    lanes = world // batching.ranks(bucket)
    rows = assign_slots((BucketBatch(count, batching.dp_group_cost(bucket), batching.at_a_time(bucket)),), lanes)
    return count, max(cell.size for row in rows for cell in row if cell is not None)


def draw_curve(
    plan: EpochSchedule, epoch_forecast: Forecast, imbalance: Array, each: Sequence[float], points: int = POINTS
) -> Curve:
    """The curve of an epoch, with at most `points` points; `each` is the cost of a sample of each bucket."""
    edges = np.unique(np.linspace(0, plan.steps, min(points, plan.steps) + 1).astype(np.int64))
    greatest = imbalance * epoch_forecast.cost
    costliest = np.array([first + greatest[first:stop].argmax() for first, stop in itertools.pairwise(edges)])
    step = np.repeat(np.arange(plan.steps), np.diff(plan.offsets))
    share_PB = np.zeros((len(edges) - 1, len(each)))
    point = np.searchsorted(edges, step, side="right") - 1
    np.add.at(share_PB, (point, plan.bucket), plan.count * np.array(each)[plan.bucket])
    return Curve(
        edges,
        epoch_forecast.cost[costliest],
        greatest[costliest],
        np.maximum.reduceat(imbalance, edges[:-1]),
        share_PB / share_PB.sum(1, keepdims=True),
    )


def _buckets(
    stage: int,
    worlds: Sequence[int],
    plans: Sequence[tuple[Batching, Order]],
    costs: SampleCosts,
    gradients: Sequence[Mapping[ShapeClass, float]],
) -> tuple[BucketPreview, ...]:
    """The buckets of a stage; `gradients`: their shares of the gradients, for each number of devices."""
    pools = plans[0][1].pools[stage]
    cost = plans[0][0].cost
    uses = {bucket: sum(pool.uses for pool in of) for bucket, of in pools.items()}
    total_cost = sum(count * cost(bucket).each for bucket, count in uses.items())
    previews = []
    for bucket in sorted(pools):
        steps = [
            full_step(batching, bucket, uses[bucket], world) for world, (batching, _) in zip(worlds, plans, strict=True)
        ]
        previews.append(
            BucketPreview(
                bucket=bucket,
                samples=sum(len(pool.places) for pool in pools[bucket]),
                uses=uses[bucket],
                tokens=costs.tokens(bucket),
                cost=cost(bucket).of(1),
                share=uses[bucket] * cost(bucket).each / total_cost,
                gradient=tuple(shares[bucket] for shares in gradients),
                step=tuple(step for step, _ in steps),
                at_a_time=tuple(most for _, most in steps),
            )
        )
    return tuple(previews)


def _datasets(
    stage: TrainingStage,
    pools: Sequence[SamplePool],
    sizes: Mapping[str, int],
    begins: Iterable[int],
    gradients: Sequence[Mapping[ShapeClass, float]],
) -> tuple[DatasetPreview, ...]:
    """The data sets of a stage, which uses `sizes` samples of them; it begins with one of the epochs `begins`.

    A data set has the part of a bucket's share of the gradients (`gradients`, for each number of devices) that it has of its uses.
    """
    asked_shares = _asked(stage, sizes)
    total_uses = sum(pool.uses for pool in pools)
    uses_of_buckets = Counter[ShapeClass]()
    for pool in pools:
        uses_of_buckets[pool.bucket] += pool.uses
    previews = []
    for name, size in sizes.items():
        dataset_pools = [pool for pool in pools if pool.dataset == name]
        uses = sum(pool.uses for pool in dataset_pools)
        epochs = max((_epochs_to_meet_all(pool, begin) for pool in dataset_pools for begin in begins), default=0)
        gradient = tuple(
            sum(shares[pool.bucket] * pool.uses / uses_of_buckets[pool.bucket] for pool in dataset_pools)
            for shares in gradients
        )
        previews.append(DatasetPreview(name, size, uses, asked_shares[name], uses / total_uses, gradient, epochs))
    return tuple(previews)


def _asked(stage: TrainingStage, sizes: Mapping[str, int]) -> dict[str, float]:
    """The share of an epoch that the config gives each data set, even to one without samples."""
    if stage.weights is not None:
        parts = over_largest({name: stage.weights.get(name, 0.0) for name in sizes})
    elif stage.temperature is not None:
        parts = over_largest(sizes, 1 / stage.temperature)
    else:
        times = stage.repeats
        parts = {name: float(size * (times if isinstance(times, int) else times[name])) for name, size in sizes.items()}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _epochs_to_meet_all(pool: SamplePool, begin: int) -> int:
    """Number of epochs, starting with `begin`, within which each sample of a pool is used."""
    size = len(pool.places)
    if pool.uses >= size:
        return 1
    behind = begin * pool.uses % size  # used in the current turn; only the next turn is sure to contain all samples
    return -(-(2 * size - behind if behind else size) // pool.uses)
