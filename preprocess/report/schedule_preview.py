"""The whole schedule of a training in numbers, for any number of devices, before anything is trained. No device, no samples:
counts of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.config import Config
from mmspeed.data import Batching
from mmspeed.data.sampling.assignment import BucketBatch, assign_slots
from mmspeed.data.sampling.batch_sizes import Measured, SampleCosts, make_batching, make_stages
from mmspeed.data.sampling.forecast import Forecast, forecast
from mmspeed.data.sampling.mixture import SamplePool, over_largest
from mmspeed.data.sampling.order import Order, TrainingStage
from mmspeed.data.sampling.schedule import EpochSchedule
from mmspeed.errors import UserError
from mmspeed.preprocess.records.caption_lengths import CaptionLengths
from mmspeed.protocols import ShapeClass

Array = npt.NDArray[Any]
WORLDS = (1, 8, 64)  # devices that are shown when nothing is said
POINTS = 200  # of a curve
UNITS = {"samples": "TFLOP", "tokens": "tokens", "flops": "TFLOP", "time": "s"}  # of a cost, by batching.by


@dataclass(frozen=True)
class BucketPreview:
    """A bucket in an epoch of a stage. Tuples have an entry for each number of devices."""

    bucket: ShapeClass
    samples: int
    uses: int  # of samples, in an epoch
    tokens: int  # of a sample
    cost: float  # of a sample alone, in the outlook's unit
    share: float  # of an epoch's cost
    step: tuple[int, ...]  # samples of a full step
    at_a_time: tuple[int, ...]  # the most of them that one device computes together


@dataclass(frozen=True)
class DatasetPreview:
    """A data set in an epoch of a stage."""

    name: str
    samples: int
    uses: int
    asked: float  # its share of the uses, by the config
    share: float  # as it comes out: whole uses of what samples there are
    epochs: int  # within which each of its samples was used


@dataclass(frozen=True)
class Curve:
    """The steps of an epoch as points; each stands for some steps that follow each other, and shows the costliest of them."""

    steps: Array  # (points + 1): point i is of the steps [steps[i], steps[i + 1])
    mean: Array  # cost of that step, mean over ranks
    greatest: Array  # of the rank with the most
    imbalance: Array  # the largest of all these steps
    share_PB: Array  # (points, buckets): shares of these steps' cost


@dataclass(frozen=True)
class EpochPreview:
    """The first epoch of a stage on so many devices, and what training makes of the stage. Imbalance is greatest over mean, 1 at best."""

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
    padding: float | None  # share of caption tokens that are padding; None: nothing is known of captions
    trained: int  # steps of the whole training
    unmet: int  # uses of the last epoch that training does not reach
    total_samples: int  # of the whole training, as are those that follow
    total_tokens: int
    total_flops: float
    curve: Curve

    @property
    def epochs(self) -> float:
        """Epochs that training makes of the stage."""
        return self.trained / self.steps


@dataclass(frozen=True)
class StagePreview:
    """A stage of training; without a curriculum there is one."""

    number: int
    begin: int  # its first step
    end: int  # behind its last; as `begin` for one that training does not come to
    buckets: tuple[BucketPreview, ...]
    datasets: tuple[DatasetPreview, ...]
    epochs: tuple[EpochPreview, ...]  # one for each number of devices


@dataclass(frozen=True)
class SchedulePreview:
    """What a config's training will be like on each of `worlds` devices."""

    worlds: tuple[int, ...]
    unit: str  # of costs
    lockstep: bool  # whether ranks meet in every micro-batch (sharded parameters), or once a step (ddp)
    stages: tuple[StagePreview, ...]

    def total(self, what: Callable[[EpochPreview], float]) -> tuple[float, ...]:
        """A sum over all stages, for each number of devices."""
        return tuple(sum(what(stage.epochs[place]) for stage in self.stages) for place in range(len(self.worlds)))

    @property
    def flops(self) -> tuple[float, ...]:
        """Of the whole training, for each number of devices."""
        return self.total(lambda epoch: epoch.total_flops)


def usual_worlds(config: Config) -> tuple[int, ...]:
    """Numbers of devices to show when nothing is said: those that a step of the config has work for."""
    slots = config.train.samples_per_step if config.batching.by == "samples" else config.batching.slots
    fitting = [world for world in WORLDS if world % config.parallel.group == 0] or [config.parallel.group]
    return tuple(world for world in fitting if slots is None or world <= slots) or (config.parallel.group,)


def preview_schedule(
    config: Config,
    groups: Mapping[tuple[ShapeClass, str], int],
    costs: SampleCosts,
    worlds: Sequence[int] | None = None,
    measured: Measured | None = None,
    captions: CaptionLengths | None = None,
) -> SchedulePreview:
    """The outlook of a config.

    Args:
        groups: how many training samples each (bucket, data set) has.
        costs: of one sample, by the model's own count.
        worlds: numbers of devices; None: the usual ones.
        measured: for `batching.by: time`.
        captions: for the share of padding.

    Raises UserError when a stage has no samples, or a bucket was not measured.
    """
    worlds = worlds or usual_worlds(config)
    costs = SampleCosts(functools.cache(costs.tokens), functools.cache(costs.flops))  # asked for every step
    sizes = {group: count for group, count in groups.items() if count}
    places = {group: np.arange(count, dtype=np.int32) for group, count in sizes.items()}
    stages = make_stages(config.data, config.curriculum)
    plans: list[tuple[Batching, Order]] = []
    for world in worlds:
        buckets = {bucket for bucket, _ in sizes}
        if world % config.parallel.group:
            raise UserError(
                f"{world} devices are no multiple of the {config.parallel.group} of {config.parallel.group_in_words()}"
            )
        batching = make_batching(
            config.batching, config.train, buckets, costs, world, config.parallel, measured=measured
        )
        known = next((order for other, order in plans if other == batching), None)  # then its plans are the same
        plans.append((batching, known or Order(places, batching, config.seed, stages)))
    lockstep = config.parallel.strategy != "ddp"
    starts = [0, *itertools.accumulate(stage.steps or 0 for stage in stages[:-1])]
    ends = [*starts[1:], config.train.steps]
    made = []
    for number, stage in enumerate(stages):
        taken = dict.fromkeys(config.data.dataset_names, 0)
        for (bucket, name), count in sizes.items():
            taken[name] += count if stage.takes(bucket) else 0
        begin, end = (min(step, config.train.steps) for step in (starts[number], ends[number]))
        epochs = [
            _epoch(number, begin, end, world, *plan, costs, lockstep, captions)
            for world, plan in zip(worlds, plans, strict=True)
        ]
        made.append(
            StagePreview(
                number,
                begin,
                end,
                _buckets(number, worlds, plans, costs),
                _datasets(
                    stage,
                    [pool for of in plans[0][1].pools[number].values() for pool in of],
                    taken,
                    {order.locate(begin).epoch for _, order in plans},
                ),
                tuple(epochs),
            )
        )
    return SchedulePreview(tuple(worlds), UNITS[config.batching.by], lockstep, tuple(made))


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
    told = forecast(plan, buckets, batching, world, order.uses(stage), costs.tokens)
    imbalance = told.lockstep if lockstep else told.window
    turns, rest = divmod(end - begin, plan.steps)
    met = np.array(uses) * turns
    if rest:
        last, _ = order.whole_epoch(stage, first + turns)
        met += last.used(rest, len(buckets))
    parts = [(count, full_step(batching, bucket, count, world)[1]) for bucket, count in zip(buckets, uses, strict=True)]
    return EpochPreview(
        world=world,
        steps=told.steps,
        samples=told.samples,
        tokens=told.tokens,
        micro_batches=float(told.rows.mean()),
        mean_imbalance=float(imbalance.mean()),
        worst_imbalance=float(imbalance.max()),
        epoch_imbalance=float((imbalance * told.cost).sum() / told.cost.sum()),
        idle=told.idle,
        mixed=told.mixed,
        short=told.short,
        left_out=told.unmet,
        padding=None if captions is None else captions.padding(parts),
        trained=end - begin,
        unmet=int(sum(uses) * (turns + 1) - met.sum()) if rest else 0,
        total_samples=int(met.sum()),
        total_tokens=sum(int(n) * costs.tokens(bucket) for n, bucket in zip(met, buckets, strict=True)),
        total_flops=sum(float(n) * costs.flops(bucket) for n, bucket in zip(met, buckets, strict=True)),
        curve=draw_curve(plan, told, imbalance, [batching.cost(bucket).each for bucket in buckets]),
    )


def full_step(batching: Batching, bucket: ShapeClass, uses: int, world: int) -> tuple[int, int]:
    """Samples of a step of one bucket alone (fewer where it has not so many uses), and the most that a device computes together."""
    count = min(uses, batching.supply(bucket, uses).step)
    lanes = world // batching.ranks(bucket)
    rows = assign_slots((BucketBatch(count, batching.dp_group_cost(bucket), batching.at_a_time(bucket)),), lanes)
    return count, max(cell.size for row in rows for cell in row if cell is not None)


def draw_curve(
    plan: EpochSchedule, told: Forecast, imbalance: Array, each: Sequence[float], points: int = POINTS
) -> Curve:
    """At most `points` points of an epoch; `each` is what a sample of each bucket costs."""
    edges = np.unique(np.linspace(0, plan.steps, min(points, plan.steps) + 1).astype(np.int64))
    greatest = imbalance * told.cost
    costliest = np.array([first + greatest[first:stop].argmax() for first, stop in itertools.pairwise(edges)])
    step = np.repeat(np.arange(plan.steps), np.diff(plan.offsets))
    share_PB = np.zeros((len(edges) - 1, len(each)))
    point = np.searchsorted(edges, step, side="right") - 1
    np.add.at(share_PB, (point, plan.bucket), plan.count * np.array(each)[plan.bucket])
    return Curve(
        edges,
        told.cost[costliest],
        greatest[costliest],
        np.maximum.reduceat(imbalance, edges[:-1]),
        share_PB / share_PB.sum(1, keepdims=True),
    )


def _buckets(
    stage: int, worlds: Sequence[int], plans: Sequence[tuple[Batching, Order]], costs: SampleCosts
) -> tuple[BucketPreview, ...]:
    pools = plans[0][1].pools[stage]
    cost = plans[0][0].cost
    uses = {bucket: sum(pool.uses for pool in of) for bucket, of in pools.items()}
    whole = sum(count * cost(bucket).each for bucket, count in uses.items())
    made = []
    for bucket in sorted(pools):
        steps = [
            full_step(batching, bucket, uses[bucket], world) for world, (batching, _) in zip(worlds, plans, strict=True)
        ]
        made.append(
            BucketPreview(
                bucket=bucket,
                samples=sum(len(pool.places) for pool in pools[bucket]),
                uses=uses[bucket],
                tokens=costs.tokens(bucket),
                cost=cost(bucket).of(1),
                share=uses[bucket] * cost(bucket).each / whole,
                step=tuple(step for step, _ in steps),
                at_a_time=tuple(most for _, most in steps),
            )
        )
    return tuple(made)


def _datasets(
    stage: TrainingStage, pools: Sequence[SamplePool], sizes: Mapping[str, int], begins: Iterable[int]
) -> tuple[DatasetPreview, ...]:
    """The data sets of a stage, of which it takes `sizes` samples; it begins with one of the epochs `begins`."""
    asked = _asked(stage, sizes)
    whole = sum(pool.uses for pool in pools)
    made = []
    for name, size in sizes.items():
        own = [pool for pool in pools if pool.dataset == name]
        uses = sum(pool.uses for pool in own)
        epochs = max((_epochs_to_meet_all(pool, begin) for pool in own for begin in begins), default=0)
        made.append(DatasetPreview(name, size, uses, asked[name], uses / whole, epochs))
    return tuple(made)


def _asked(stage: TrainingStage, sizes: Mapping[str, int]) -> dict[str, float]:
    """The share of an epoch that the config gives each data set, whether it has samples or not."""
    if stage.weights is not None:
        parts = over_largest({name: stage.weights.get(name, 0.0) for name in sizes})
    elif stage.temperature is not None:
        parts = over_largest(sizes, 1 / stage.temperature)
    else:
        times = stage.repeats
        parts = {name: float(size * (times if isinstance(times, int) else times[name])) for name, size in sizes.items()}
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()}


def _epochs_to_meet_all(pool: SamplePool, begin: int) -> int:
    """Epochs within which each sample of a pool is used, when epoch `begin` is the first of them."""
    size = len(pool.places)
    if pool.uses >= size:
        return 1
    behind = begin * pool.uses % size  # of the turn that it begins in; only the next turn has all samples for certain
    return -(-(2 * size - behind if behind else size) // pool.uses)
