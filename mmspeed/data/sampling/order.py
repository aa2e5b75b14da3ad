"""The order of training as numbers: the buckets of each step, the position of a step, and the state to resume from.

Training is a sequence of stages (one, without a curriculum), each of epochs. Every use of an epoch is in exactly one of its steps;
nothing is dropped, and nothing is drawn twice to fill up. Each bucket's uses are taken in a random order from first to last, so a
position in an epoch is the number of past uses of each bucket: a few numbers, from which any other batching can continue.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmspeed.errors import UserError
from mmspeed.protocols import OrderedSample, ShapeClass
from mmspeed.rng import stream

from .assignment import Cost
from .mixture import SamplePool, rates, uses_of
from .schedule import Array, BucketSupply, EpochPartition, EpochSchedule, Mix, partition_epoch, shuffle


@dataclass(frozen=True)
class Batching:
    """Sizes and costs of a step's batches. They do not depend on the rank; `slots` may depend on the world size.

    A step has `slots` device batches; one of bucket b has `sizes[b]` samples and costs `costs[b]` (by default, the bucket's size).
    `group` ranks compute a device batch of videos together (sequence-parallel times tensor-parallel ranks), so a step has
    slots / group of them; for images the `tensor` ranks do. A bucket without a size has steps of `slots` samples. With `alone`,
    the costs on one rank, steps are the same for any group: `slots` device batches of every bucket, in the order of these costs.
    With `share`, a sample's cost over its bucket's, a step's samples are assigned to ranks by their own costs; the choice of samples
    for a step depends on the buckets' costs only.
    """

    slots: int
    sizes: Mapping[ShapeClass, int] = field(default_factory=dict)
    costs: Mapping[ShapeClass, Cost] = field(default_factory=dict)
    mix: Mix = "same"
    tolerance: float = 0.02
    group: int = 1
    most: int | None = None  # samples computed at a time, for buckets without an entry in `sizes`
    tensor: int = 1
    alone: Mapping[ShapeClass, Cost] | None = None
    share: Callable[[OrderedSample], float] | None = None  # None: samples of a bucket cost alike

    def cost(self, bucket: ShapeClass) -> Cost:
        """The cost that determines the order of steps."""
        return (self.alone or self.costs).get(bucket) or _by_size(bucket)

    def dp_group_cost(self, bucket: ShapeClass) -> Cost:
        """The cost for each of the ranks that compute a sample together."""
        return self.costs.get(bucket) or _by_size(bucket)

    def ranks(self, bucket: ShapeClass) -> int:
        """The number of ranks that compute a sample together."""
        return self.group if bucket.splits else self.tensor

    def at_a_time(self, bucket: ShapeClass) -> int | None:
        """The most samples that a device computes at a time; None: any number."""
        return min(self.sizes[bucket], self.most or self.sizes[bucket]) if bucket in self.sizes else self.most

    def supply(self, bucket: ShapeClass, uses: int) -> BucketSupply:
        shared = bucket in self.sizes and self.alone is None
        slots = max(1, self.slots // self.ranks(bucket)) if shared else self.slots
        return BucketSupply(uses, self.sizes.get(bucket, 1), self.cost(bucket), slots)


def _by_size(bucket: ShapeClass) -> Cost:
    return Cost(0.0, float(bucket.numbers))


@dataclass(frozen=True)
class TrainingStage:
    """A part of training: its steps (all remaining ones for the last stage), buckets, and uses of the data sets in an epoch.

    `repeats`, `weights` and `temperature` are those of `mmspeed.data.sampling.mixture.rates`, for the samples of the stage.
    """

    steps: int | None = None
    takes: Callable[[ShapeClass], bool] = lambda bucket: True
    repeats: Mapping[str, int] | int = 1
    weights: Mapping[str, float] | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class SamplerState:
    """A position in the order of training: at `step`, the past uses of each bucket (by name) in this epoch of this stage.

    `planned`: the steps of the epoch by the plan that it began with, whatever plan goes on with it; 0 at its beginning.
    """

    step: int = 0
    stage: int = 0
    epoch: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    planned: int = 0


class StepLocation(NamedTuple):
    """The position of a step; epochs are counted through all stages."""

    stage: int
    epoch: int
    at: int


@dataclass(frozen=True)
class _EpochRun:
    """Epochs of a stage that have the same uses: from `epoch` on, each of `length` steps, from step `begin` to `end`.

    `planned`: the steps of each by the plan that it began with, more than `length` for the rest of one.
    """

    stage: int
    begin: int
    end: int | None
    epoch: int
    length: int
    used: Mapping[str, int]
    planned: int


MOST_USES = 10**9  # of an epoch: its order takes 8 bytes a use
Groups = Mapping[tuple[ShapeClass, str], Array]


class Order:
    """The part of `BatchSampler` that needs no samples.

    Args:
        groups: the indices of the samples of each (bucket, data set) among all samples.
        batching: sizes and costs of a step's batches.
        seed: seed of the order.
        stages: parts of training; none: a single one of all buckets.

    Raises UserError if there are no samples for a stage.
    """

    def __init__(self, groups: Groups, batching: Batching, seed: int, stages: Sequence[TrainingStage] = ()) -> None:
        if batching.slots < 1:
            raise ValueError(f"a step of {batching.slots}: use at least 1")
        self.batching, self.seed = batching, seed
        self.sizes = _sizes(groups)
        self.stages = tuple(stages) or (TrainingStage(),)
        self.pools = [_pools(stage, groups) for stage in self.stages]
        for number, pools in enumerate(self.pools, start=1):
            if not pools:
                raise UserError(
                    f"curriculum: stage {number} has no training sample; `mmspeed check` shows how many each bucket has"
                )
            if self.uses(number - 1) > MOST_USES:
                raise UserError(
                    f"an epoch would use samples {self.uses(number - 1):,} times, more than {MOST_USES:,}: lower the repeats"
                )
        self.origin = SamplerState()
        # reading ahead may be an epoch beyond training
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
        self._division = functools.lru_cache(maxsize=8)(self._divide)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every whole epoch of the first stage."""
        return self._division(0, ()).steps

    def locate(self, step: int) -> StepLocation:
        """The position of an optimizer step. Raises IndexError for one before the origin, or after the last stage."""
        run = self._run(step)
        turn, index = divmod(step - run.begin, run.length)
        return StepLocation(run.stage, run.epoch + turn, index)

    def position(self, step: int) -> SamplerState:
        """The position that a checkpoint taken before `step` records."""
        run = self._run(step)
        location = self.locate(step)
        buckets = self._buckets(location.stage)
        behind = self._plan(location.stage, location.epoch, _frozen(run.used)).used(location.at, len(buckets))
        used = {
            bucket.name: count + run.used.get(bucket.name, 0) for bucket, count in zip(buckets, behind, strict=True)
        }
        past = {name: count for name, count in used.items() if count}
        return SamplerState(step, location.stage, location.epoch, past, run.planned if past else 0)

    def mean_of_epoch(self, step: int, size: Callable[[ShapeClass], float]) -> float:
        """The mean over the steps of `step`'s epoch, as planned at its beginning, of the sizes of their samples.

        `size`: of a sample of a bucket.
        """
        run = self._run(step)
        uses = {bucket: sum(pool.uses for pool in pools) for bucket, pools in self.pools[run.stage].items()}
        return sum(count * size(bucket) for bucket, count in uses.items()) / run.planned

    def uses(self, stage: int = 0) -> int:
        """Uses of samples in an epoch of a stage."""
        return sum(pool.uses for pools in self.pools[stage].values() for pool in pools)

    def samples_of(self, stage: int) -> int:
        """The number of samples that a stage uses in any of its epochs."""
        return sum(len(pool.places) for pools in self.pools[stage].values() for pool in pools)

    def whole_epoch(self, stage: int = 0, epoch: int = 0) -> tuple[EpochSchedule, list[ShapeClass]]:
        """The steps of a whole epoch of a stage, and the list of buckets that its numbers index."""
        return self._plan(stage, epoch, ()), self._buckets(stage)

    @property
    def first_pass(self) -> int:
        """The step by which every stage's first epoch has ended; later steps need no sample that was not used by then."""
        run = next(run for run in self._runs if run.stage == len(self.stages) - 1)
        return run.begin + run.length

    def _run(self, step: int) -> _EpochRun:
        if step >= self.origin.step:
            for run in self._runs:
                if run.end is None or step < run.end:
                    return run
        raise IndexError(f"there is no step {step}: the order begins at {self.origin.step}")

    @functools.cached_property
    def _runs(self) -> list[_EpochRun]:
        """The runs from the origin on: the rest of its epoch, then the whole epochs of its stage and of the later ones."""
        starts = [0, *itertools.accumulate(stage.steps or 0 for stage in self.stages)]
        runs, step, epoch, used = [], self.origin.step, self.origin.epoch, self.origin.used
        for number in range(self.origin.stage, len(self.stages)):
            end = None if number == len(self.stages) - 1 else starts[number + 1]
            if any(used.values()):
                length = self._division(number, _frozen(used)).steps
                close = step + length if end is None else min(end, step + length)
                runs.append(_EpochRun(number, step, close, epoch, length, used, self.origin.planned))
                step, epoch, used = close, epoch + 1, {}
            length = self._division(number, ()).steps
            if end is None or step < end:
                runs.append(_EpochRun(number, step, end, epoch, length, {}, length))
            if end is not None and step < end:
                epoch += -(-(end - step) // length)
                step = end
        return runs

    def pieces(self, step: int) -> list[tuple[ShapeClass, int, int]]:
        """(bucket, first use, uses) of an optimizer step, buckets in order; uses are counted through the epoch."""
        run, location = self._run(step), self.locate(step)
        buckets = self._buckets(location.stage)
        schedule_pieces = self._plan(location.stage, location.epoch, _frozen(run.used)).pieces(location.at)
        return [
            (buckets[number], start + run.used.get(buckets[number].name, 0), count)
            for number, start, count in schedule_pieces
        ]

    def _buckets(self, stage: int) -> list[ShapeClass]:
        return list(self.pools[stage])

    def _divide(self, stage: int, used: tuple[tuple[str, int], ...]) -> EpochPartition:
        behind, batching = dict(used), self.batching
        supplies = [
            batching.supply(bucket, sum(pool.uses for pool in pools) - behind.get(bucket.name, 0))
            for bucket, pools in self.pools[stage].items()
        ]
        return partition_epoch(supplies, batching.mix, batching.tolerance)

    def _make_plan(self, stage: int, epoch: int, used: tuple[tuple[str, int], ...]) -> EpochSchedule:
        return shuffle(self._division(stage, used), stream(self.seed, "step_order", epoch))

    def start_from(self, origin: SamplerState) -> None:
        """Begin the order at a position: past uses of its epoch are not repeated."""
        self.origin = origin
        self.__dict__.pop("_runs", None)

    def stage_at(self, step: int) -> int:
        """The stage of an optimizer step."""
        ends = itertools.accumulate(stage.steps or 0 for stage in self.stages[:-1])
        return next((number for number, end in enumerate(ends) if step < end), len(self.stages) - 1)


def _frozen(used: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, count) for name, count in used.items() if count))


def _sizes(groups: Mapping[tuple[ShapeClass, str], Array]) -> dict[str, int]:
    """The number of samples in each bucket, by its name."""
    sizes: dict[str, int] = {}
    for (bucket, _), places in groups.items():
        sizes[bucket.name] = sizes.get(bucket.name, 0) + len(places)
    return sizes


def _pools(stage: TrainingStage, groups: Mapping[tuple[ShapeClass, str], Array]) -> dict[ShapeClass, list[SamplePool]]:
    """The pools that an epoch of a stage uses, by bucket."""
    by_dataset: dict[str, dict[ShapeClass, Array]] = {}
    for (bucket, dataset), places in groups.items():
        if stage.takes(bucket):
            by_dataset.setdefault(dataset, {})[bucket] = places
    sizes = {dataset: sum(map(len, of.values())) for dataset, of in by_dataset.items()}
    rate = rates(sizes, stage.repeats, stage.weights, stage.temperature)
    pools = [
        SamplePool(bucket, dataset, places, uses)
        for dataset, of in by_dataset.items()
        for (bucket, places), uses in zip(of.items(), uses_of([*map(len, of.values())], rate[dataset]), strict=True)
        if uses
    ]
    by_bucket: dict[ShapeClass, list[SamplePool]] = {}
    for pool in sorted(pools, key=lambda pool: (pool.bucket, pool.dataset)):
        by_bucket.setdefault(pool.bucket, []).append(pool)
    return by_bucket
