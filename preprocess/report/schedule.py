"""Forecast the schedule of a training for any number of devices, from counts of samples alone, with the sampler that training uses."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.config import Config
from mmspeed.data.sampling.assignment import BucketBatch, assign_slots
from mmspeed.data.sampling.batch_sizes import Measured, SampleCosts, make_batching, make_stages
from mmspeed.data.sampling.forecast import Forecast, forecast
from mmspeed.data.sampling.mixture import rates
from mmspeed.data.sampling.order import Order
from mmspeed.data.sampling.weighting import gradient_shares
from mmspeed.device import devices_here
from mmspeed.errors import UserError
from mmspeed.log import format_figure
from mmspeed.protocols import RunWork, ShapeClass

Array = npt.NDArray[Any]
UNITS = {"samples": "TFLOP", "tokens": "tokens", "flops": "TFLOP", "time": "s"}  # of a cost, by batching.by
UNEVEN = 1.05  # imbalance above which a hint is given
HEAD = (
    *("devices", "stage", "epochs", "steps", "samples", "tokens", "micro-batches"),
    *("imbalance", "worst", "epoch's", "idle", "mixed", "short", "TFLOP"),
)


@dataclass(frozen=True)
class StageForecast:
    """A stage of training on `world` devices: its first epoch, and its steps, uses and FLOPs in the whole training.

    dealt: the devices over which a step's samples are dealt; each stage of a pipeline has so many.
    """

    world: int
    dealt: int
    begin: int  # its first step
    end: int  # after its last; equal to `begin` for a stage that training does not reach
    order: Order
    epoch: Forecast
    imbalance: Array  # of each step of the epoch: greatest over mean cost across ranks
    gradient: Mapping[ShapeClass, float]  # shares of the epoch's gradients
    uses: Mapping[ShapeClass, int]  # of samples
    flops: float

    @property
    def epochs(self) -> float:
        return (self.end - self.begin) / self.epoch.steps

    @property
    def epoch_imbalance(self) -> float:
        """Greatest over mean of the epoch's time."""
        return float((self.imbalance * self.epoch.cost).sum() / self.epoch.cost.sum())

    def cells(self, number: int) -> tuple[str, ...]:
        """The row of the table for stage `number`."""
        epoch = self.epoch
        return (
            f"{self.world:,}",
            f"{number}",
            f"{self.epochs:,.2f}",
            f"{epoch.steps:,}",
            f"{epoch.samples / epoch.steps:,.1f}",
            f"{epoch.tokens / epoch.steps:,.0f}",
            f"{epoch.rows.mean():,.2f}",
            f"{self.imbalance.mean():.4f}",
            f"{self.imbalance.max():.4f}",
            f"{self.epoch_imbalance:.4f}",
            f"{epoch.idle:,}",
            f"{epoch.mixed:,}",
            f"{epoch.short:,}",
            format_figure(self.flops / 1e12),
        )

    def full_step(self, bucket: ShapeClass, uses: int) -> tuple[int, int]:
        """Samples of a step of a single bucket (fewer if it has fewer uses), and the most that a device computes together."""
        batching = self.order.batching
        count = min(uses, batching.supply(bucket, uses).step)
        lot = BucketBatch(count, batching.dp_group_cost(bucket), batching.at_a_time(bucket))
        rows = assign_slots((lot,), self.dealt // batching.ranks(bucket))
        return count, max(cell.size for row in rows for cell in row if cell is not None)


@dataclass(frozen=True)
class ScheduleForecast:
    """The forecast of a config's training: of each stage, an entry for each number of devices in `worlds`."""

    config: Config
    worlds: tuple[int, ...]
    sizes: Mapping[tuple[ShapeClass, str], int]  # samples of each (bucket, data set)
    stages: tuple[tuple[StageForecast, ...], ...]

    @property
    def epochs(self) -> list[float]:
        """Epochs of the whole training, for each number of devices."""
        return [sum(stage.epochs for stage in on_one) for on_one in zip(*self.stages, strict=True)]

    @property
    def flops_of_busiest(self) -> list[float]:
        """FLOPs of the whole training for a device, where all wait for the busiest, for each number of devices."""
        return [
            sum(stage.flops * stage.epoch_imbalance / stage.world for stage in on_one)
            for on_one in zip(*self.stages, strict=True)
        ]

    @property
    def works(self) -> list[RunWork]:
        """The work of the whole training, for each number of devices; the busiest one has its imbalance more than the mean."""
        works = []
        for on_one, epochs in zip(zip(*self.stages, strict=True), self.epochs, strict=True):
            items = Counter[ShapeClass]()
            for stage in on_one:
                items.update({bucket: n * stage.epoch_imbalance / stage.world for bucket, n in stage.uses.items()})  # type: ignore[misc]
            micro_batches = sum(float(stage.epoch.rows.mean()) * (stage.end - stage.begin) for stage in on_one)
            of = _count(sum(self.sizes.values()), "training sample")
            works.append(RunWork(on_one[0].world, epochs, of, items, micro_batches / self.config.train.steps))
        return works

    def table(self) -> list[tuple[str, ...]]:
        """The head and the rows, a row for each stage on each number of devices; a single stage has no number."""
        rows = [one.cells(number) for number, stage in enumerate(self.stages, 1) for one in stage]
        keep = [place for place, name in enumerate(HEAD) if name != "stage" or len(self.stages) > 1]
        return [tuple(row[place] for place in keep) for row in (HEAD, *rows)]

    def note(self) -> str:
        """A sentence about the table."""
        meet = "once a step" if self.config.parallel.strategy == "ddp" else "in every micro-batch"
        return (
            "steps: of an epoch; samples, tokens (of the model) and micro-batches: of a step, mean;"
            f" imbalance: greatest / mean cost across ranks, which synchronise {meet}: mean over steps, worst step, the epoch's;"
            " idle: micro-batches without a sample; mixed: steps of several buckets; short: of less than 0.9 of the median's cost;"
            " TFLOP: of the whole training"
        )

    def parts(self) -> list[tuple[str, list[str]]]:
        """For each stage, a sentence about the samples that an epoch uses, and a line for each of its buckets and data sets."""
        return [
            (self._sentence(number), [*self._bucket_lines(number), *self._dataset_lines(number)])
            for number in range(len(self.stages))
        ]

    def lines(self, tables: bool = True) -> list[str]:
        """The schedule as `mmspeed check` prints it; without the tables a sentence for each stage."""
        if not tables:
            return [sentence for sentence, _ in self.parts()]
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        parts = [line for sentence, lines in self.parts() for line in (sentence, *(f"  {one}" for one in lines))]
        return [*parts, *(f"    {row}" for row in rows), f"    ({self.note()})"]

    def _sentence(self, number: int) -> str:
        first, stage = self.stages[number][0], f", stage {number + 1}"
        reached = (
            f"(steps {first.begin + 1:,} to {first.end:,})"
            if first.begin < first.end
            else "(not reached by train.steps)"
        )
        left_out = max(one.epoch.unmet for one in self.stages[number])
        outcome = f"{left_out:,} are in NO step" if left_out else "each is in exactly one step; 0 dropped, 0 held over"
        uses, samples = _count(first.order.uses(number), "use"), _count(first.order.samples_of(number), "sample")
        where = f"{stage} {reached}" if len(self.stages) > 1 else ""
        return f"schedule{where}: an epoch has {uses} of {samples}; {outcome}"

    def _bucket_lines(self, number: int) -> list[str]:
        stage, uses = self.stages[number], self._uses(number)
        costs = {bucket: count * stage[0].order.batching.cost(bucket).each for bucket, count in uses.items()}
        lines = []
        for bucket, count in sorted(uses.items()):
            steps, most = zip(*(one.full_step(bucket, count) for one in stage), strict=True)
            lines.append(
                f"bucket {bucket}: {_count(count, 'use')}, {costs[bucket] / sum(costs.values()):.1%} of the cost,"
                f" {_each(f'{one.gradient[bucket]:.1%}' for one in stage)} of the gradients;"
                f" {_each(f'{step:,}' for step in steps)} a full step, {_each(f'{one:,}' for one in most)} a device at a time"
            )
        return lines

    def _dataset_lines(self, number: int) -> list[str]:
        shares = self._shares(number) if len(self.config.data.sources) > 1 else {}
        return [
            f"data set {name}: {share:.2%} of an epoch's uses ({asked:.2%} asked)"
            for name, (share, asked) in shares.items()
        ]

    def _uses(self, number: int) -> Counter[ShapeClass]:
        """Uses of the buckets in an epoch of a stage."""
        pools = self.stages[number][0].order.pools[number]
        return Counter({bucket: sum(pool.uses for pool in of) for bucket, of in pools.items()})

    def _shares(self, number: int) -> dict[str, tuple[float, float]]:
        """The share of an epoch's uses that each data set has, and the one that the config gives it."""
        order = self.stages[number][0].order
        stage = order.stages[number]
        uses, sizes = Counter[str](), dict.fromkeys(self.config.data.dataset_names, 0)
        for pool in (pool for of in order.pools[number].values() for pool in of):
            uses[pool.dataset] += pool.uses
        for (bucket, name), count in self.sizes.items():
            sizes[name] += count if stage.takes(bucket) else 0
        rate = rates(sizes, stage.repeats, stage.weights, stage.temperature)
        asked = {name: rate[name] * size for name, size in sizes.items()}
        return {name: (uses[name] / uses.total(), asked[name] / sum(asked.values())) for name in sizes}

    def hints(self) -> list[str]:
        """Sentences about waiting and idle devices and uneven shares, each with the setting to change."""
        config, batching, group = self.config, self.config.batching, self.config.parallel.group
        slots = config.train.samples_per_step if batching.by == "samples" else batching.slots
        name = "train.batch_size" if batching.by == "samples" else "batching.slots"
        sentences = []
        groups = self.config.parallel.groups
        uneven = [world for world in self.worlds if slots is not None and slots % groups(world)]
        if slots is not None and uneven:
            few = " (some compute nothing at all)" if any(groups(world) > slots for world in uneven) else ""
            sentences.append(
                f"{name} {slots} cannot be divided evenly by {_together(uneven)} devices{few}; make it a multiple of the devices"
                + (f", or of their groups of {group}" if group > 1 else "")
            )
        for number in range(len(self.stages)):
            where = f"stage {number + 1}: " if len(self.stages) > 1 else ""
            own = [*self._device_hints(number, uneven), *self._budget_hints(number)]
            sentences += [where + sentence for sentence in (*own, *self._share_hints(number))]
        return sentences

    def _device_hints(self, number: int, uneven: Sequence[int]) -> list[str]:
        stage, sentences = self.stages[number], []
        uses = stage[0].order.uses(number)
        few_for = [one.world for one in stage if uses < one.dealt and one.world not in uneven]
        if few_for:
            sentences.append(
                f"an epoch has {_count(uses, 'use')} of samples, fewer than {_together(few_for)} devices: some compute nothing;"
                " use fewer, or raise data.repeats"
            )
        waits = {
            one.world: imbalance
            for one in stage
            if one.world not in (*uneven, *few_for)
            and (imbalance := max(float(one.imbalance.mean()), one.epoch_imbalance)) > UNEVEN
        }
        if waits:
            sentences.append(
                f"on {_together(waits)} devices the busiest computes up to {max(waits.values()):.2f} of the mean, and the others wait;"
                f" {_knob(self.config)}"
            )
        return sentences

    def _budget_hints(self, number: int) -> list[str]:
        budget, batching = self.config.batching.budget, self.stages[number][0].order.batching
        costs = {bucket: batching.cost(bucket).of(1) for bucket in sorted(self._uses(number))}
        return [
            f"one sample of bucket {bucket} costs {format_figure(cost)} {UNITS[self.config.batching.by]}, more than batching.budget"
            f" ({budget:g}): its batches are larger than the budget; raise it, or leave the bucket out"
            for bucket, cost in costs.items()
            if budget is not None and cost > budget * (1 + 1e-9)
        ]

    def _share_hints(self, number: int) -> list[str]:
        """Sentences about data sets whose share differs from the requested one: each bucket of a data set is used in every epoch."""
        return [
            f"data set {name} makes {share:.2%} of an epoch, not {asked:.2%}: it is used at least once for each of its buckets;"
            " raise data.repeats, or give it fewer buckets"
            for name, (share, asked) in self._shares(number).items()
            if asked and abs(share - asked) > max(0.005, 0.2 * asked)
        ]


def usual_worlds(config: Config) -> tuple[int, ...]:
    """The default number of devices to show: those of this machine, or as many as the layout needs."""
    return (devices_here(config.device.kind, config.parallel.through),)


def forecast_schedule(
    config: Config,
    groups: Mapping[tuple[ShapeClass, str], int],
    costs: SampleCosts,
    worlds: Sequence[int] | None = None,
    measured: Measured | None = None,
) -> ScheduleForecast:
    """Forecast the schedule of a config.

    Args:
        groups: the number of training samples of each (bucket, data set).
        costs: the costs of one sample, by the model's own count.
        worlds: numbers of devices; None: those of this machine.
        measured: measurements, for `batching.by: time`.

    Raises UserError if a stage has no samples, or a bucket was not measured.
    """
    worlds, parallel = tuple(worlds or usual_worlds(config)), config.parallel
    costs = SampleCosts(functools.cache(costs.tokens), functools.cache(costs.flops))  # called for every step
    sizes = {group: count for group, count in groups.items() if count}
    places = {group: np.arange(count, dtype=np.int32) for group, count in sizes.items()}
    stages = make_stages(config.data, config.curriculum)
    starts = [0, *itertools.accumulate(stage.steps or 0 for stage in stages[:-1]), config.train.steps]
    spans = [*itertools.pairwise(min(step, config.train.steps) for step in starts)]
    by_world = []
    for world in worlds:
        if world % parallel.through:
            raise UserError(
                f"{world} devices are not a multiple of the {parallel.through} of {parallel.together_in_words()}"
            )
        buckets = {bucket for bucket, _ in sizes}
        batching = make_batching(
            config.batching, config.train, buckets, costs, parallel.dealt(world), parallel, measured=measured
        )
        order = Order(places, batching, config.seed, stages)
        by_world.append([_stage(config, number, span, world, order, costs) for number, span in enumerate(spans)])
    return ScheduleForecast(config, worlds, sizes, tuple(zip(*by_world, strict=True)))


def _stage(
    config: Config, number: int, span: tuple[int, int], world: int, order: Order, costs: SampleCosts
) -> StageForecast:
    begin, end = span
    first = order.locate(begin).epoch
    plan, buckets = order.whole_epoch(number, first)
    dealt = config.parallel.dealt(world)
    epoch = forecast(plan, buckets, order.batching, dealt, order.uses(number), costs.tokens)
    turns, rest = divmod(end - begin, plan.steps)
    uses = np.array([sum(pool.uses for pool in order.pools[number][bucket]) for bucket in buckets]) * turns
    if rest:
        uses += order.whole_epoch(number, first + turns)[0].used(rest, len(buckets))
    return StageForecast(
        world,
        dealt,
        begin,
        end,
        order,
        epoch,
        epoch.window if config.parallel.strategy == "ddp" else epoch.lockstep,  # ranks of ddp meet once a step
        gradient_shares(plan, buckets, config.weighting, costs.tokens),
        dict(zip(buckets, uses.tolist(), strict=True)),
        float(uses @ np.array([costs.flops(bucket) for bucket in buckets])),
    )


def _knob(config: Config) -> str:
    if config.batching.by == "samples":
        return "use batching.by: flops, whose steps have equal cost"
    more = "a larger batching.accumulate, more data.repeats, or fewer devices reduce it"
    other = {"same": "batching.mix: matched, ", "window": "batching.mix: same, "}
    return f"{other.get(config.batching.mix, '')}{more}"


def _each(cells: Iterable[str]) -> str:
    """The common cell, or those of each number of devices."""
    every = [*cells]
    return every[0] if len(set(every)) == 1 else " / ".join(every)


def _together(numbers: Iterable[int]) -> str:
    *before, last = map(str, numbers)
    return f"{', '.join(before)} and {last}" if before else last


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
