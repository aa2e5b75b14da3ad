"""`mmspeed plan CONFIG --pipeline`: a step of a pipeline before it runs, simulated on the tables that run, and the best ways to set it.

Durations are counted from shapes: operations at a device's rate, and bytes at the speeds of links. Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from mmspeed.axes import AxisName, mesh_table
from mmspeed.config import RunConfig
from mmspeed.config.parallel import ParallelConfig, ScheduleName
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_bytes, progress
from mmspeed.memory.planning.options import StepFigures
from mmspeed.pipelines.run.run_folder import write_text
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.memory_estimate import DeviceSpeeds, KnownEnds, figures_of_ranks, shape_figures
from mmspeed.pipelines.tuning.stage_work import MicroBatchWork, NodeWork, PassWork, Sent, micro_batch_work
from mmspeed.pipelines.tuning.step_time import rates
from mmspeed.plan.overlap import Exposed, Node, StageNodes, exposed, step_of
from mmspeed.plan.pipeline_picture import WIDTH, pipeline_svg, seconds_shown
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.simulate import Simulated, picture
from mmspeed.plan.traffic import NODE
from mmspeed.protocols import MicroBatchSize, RunPlace, shape_words

INNER = 200.0  # GB/s of a device to others of its node, where nothing else is said
SHOWN, CELLS = 8, 120  # candidates in a table; columns of a picture
MOST_STAGES = 4  # of a rank, in a search
BAR = 14.0  # width that a pass has in a drawing, in the mean
_NOT_COUNTED = "gathers and sums over shards, and exchanges of tp and of split tokens, are not counted"
_LESS = "set memory.activation_policy: {block: recompute}, shard over more devices, or make micro-batches smaller"
KEYS = ("pp", "virtual", "schedule", "extra_warmup")
SCHEDULES = get_args(ScheduleName)
_PLAIN = ("1f1b", "interleaved")  # those with extra_warmup


@dataclass(frozen=True)
class Rates:
    """What durations are counted with: operations a second of a device, and bytes a second of its links."""

    flops: float
    inner: float
    outer: float
    words: str

    @classmethod
    def of(cls, config: RunConfig, tflops: float | None, inner: float | None, outer: float | None) -> Rates:
        """The given rates; others are those that the config names, or those of a usual accelerator."""
        where, flops = (" of --tflops", tflops * 1e12) if tflops else rates(config)[-1]
        inner, outer = inner or INNER, outer or config.parallel.balance.gigabytes_per_second
        words = f"{flops / 1e12:.0f} TFLOP/s{where}, {inner:g} GB/s within a node of {NODE} devices and {outer:g} GB/s between nodes"
        return cls(flops, inner * 1e9, outer * 1e9, words)

    def nodes(self, work: PassWork, parallel: ParallelConfig) -> StageNodes:
        """Seconds of the nodes of a stage, on each of the devices that compute an item together."""
        rate, group = self.flops * parallel.group, parallel.group

        def seconds(nodes: Sequence[NodeWork]) -> tuple[Node, ...]:
            return tuple(
                Node(node.operations / rate, self._exchange(node.sent, parallel) / group, node.weights / rate)
                for node in nodes
            )

        return StageNodes(seconds(work.forward), seconds(work.backward))

    def _exchange(self, sent: Sent, parallel: ParallelConfig) -> float:
        """Seconds of an exchange of rows with experts on other devices: of its slower link."""
        near = max(n for n in range(1, NODE + 1) if parallel.ep % n == 0)  # devices of `ep` on a node
        flat = (parallel.ep - near) / max(1, parallel.ep - 1)
        far = {AxisName.EP_OUTER.value: 1.0, AxisName.EP.value: flat}
        outer = sum(nbytes * far.get(axis, 0.0) for axis, nbytes in sent.items())
        return max(outer / self.outer, (sum(sent.values()) - outer) / self.inner)


@dataclass(frozen=True)
class PlannedStep:
    """A step of a layout. shares: of each rank in the work of all.

    exposed: what exchanges add; None: not asked. series: the same if the passes of pairs ran one after another; None: there are no pairs.
    """

    parallel: ParallelConfig
    size: MicroBatchSize
    bounds: Sequence[range]
    simulated: Simulated
    shares: tuple[float, ...]
    exposed: Exposed | None = None
    series: Exposed | None = None

    @property
    def pipeline(self) -> Pipeline:
        """Its stages and schedule."""
        return Pipeline.of(self.parallel)

    @property
    def keys(self) -> str:
        """Its keys."""
        keys = self.parallel.model_dump(mode="json", include=set(KEYS), exclude_defaults=True)
        return " ".join(f"parallel.{key}={str(keys[key]).lower()}" for key in KEYS if key in keys)

    def lines(self, memory: Sequence[int]) -> list[str]:
        """The step in lines, and its picture. memory: bytes of each rank."""
        step, pipeline = self.simulated, self.pipeline
        short = f", fewer than fill {pipeline.schedule}" if self.size.batches < pipeline.least else ""
        lines = [
            f"a step of {self.size.batches} micro-batches{short} of {shape_words(self.size.shape)} x {self.size.items}: "
            f"{seconds_shown(step.step)}, of which the busiest rank stands still for {step.idle:.1%}"
        ]
        lines += self.exposed_lines()
        lines.append(f"{'rank':>4}  {'work':>6} {'waits':>6} {'in flight':>9} {'memory':>9}  blocks of its stages")
        for rank, (share, wait, flying, nbytes) in enumerate(
            zip(self.shares, step.waits, step.in_flight, memory, strict=True)
        ):
            held = ", ".join(_words(self.bounds[stage]) for stage in pipeline.own(rank))
            lines.append(
                f"{rank:>4}  {share:>6.1%} {wait / step.step:>6.1%} {flying:>9} {format_bytes(nbytes):>9}  {held}"
            )
        unit = max(step.step / CELLS, min(end - begin for row in step.spans for _, begin, end in row))
        lines.append(
            f"each sign is {seconds_shown(unit)}: digits forward, letters backward, capitals gradients of weights, dots waiting"
        )
        return lines + picture(step, unit)

    def exposed_lines(self) -> list[str]:
        """What exchanges add to the step, with overlap and without."""
        if self.exposed is None:
            return []
        if self.series is None:
            return [f"exposed exchanges, by which the step is longer: {_added(self.exposed)}"]
        without = f"{_added(self.series)}, in a step of {seconds_shown(self.series.step.step)}"
        return [
            f"exposed exchanges, by which the step is longer: {_added(self.exposed)}",
            f"without overlap, if passes ran one after another: {without}",
        ]


def _added(exposed: Exposed) -> str:
    words = {"messages": "messages between stages", "experts": "rows of experts"}
    each = (f"{words[kind]} {seconds_shown(by)} ({by / exposed.step.step:.1%})" for kind, by in exposed.seconds.items())
    return ", ".join(each)


def _words(blocks: range) -> str:
    return f"{blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else f"{blocks.start}"


class PipelinePlanner:
    """The steps of a config's pipelines on a number of devices, all of one count of the model.

    devices: None: the fewest of the layout. batches: micro-batches of a step; None: those of the config. task: open; None: the config's,
    without data. Raises UserError where the layout does not fit the devices.
    """

    def __init__(
        self,
        config: RunConfig,
        given: Rates,
        devices: int | None = None,
        batches: int | None = None,
        task: Task | None = None,
    ) -> None:
        self.config, self.rates, self.batches = config, given, batches
        least = _least(config.parallel)
        self.devices = devices or least
        if self.devices % least:
            near = least * max(1, round(self.devices / least))
            raise UserError(
                f"--devices {devices}: this layout takes {least} devices or a multiple of them, such as {near}"
            )
        self.task = task or make_task(config)
        if task is None:
            self.task.domain.open_without_data()
        self._works: dict[tuple[object, int], MicroBatchWork] = {}
        self._bounds: dict[tuple[int, int, bool, tuple[int, ...]], Sequence[range]] = {}
        self._figures: dict[tuple[object, ...], StepFigures] = {}
        self._ends: dict[tuple[int, bool, tuple[range, ...]], KnownEnds] = {}
        self._ranks: dict[tuple[Pipeline, tuple[range, ...]], tuple[StepFigures, ...]] = {}

    def size(self, parallel: ParallelConfig) -> MicroBatchSize:
        """The largest micro-batch of a layout, and their number in a step."""
        mesh_table(self.devices, parallel.axis_sizes())
        dealt = self.devices // parallel.pp
        place = RunPlace(Device("cpu", 0), world=self.devices, dealt=dealt, groups=max(1, dealt // parallel.group))
        size = self.task.domain.largest_micro_batch(place)
        return size if self.batches is None else replace(size, batches=self.batches, accumulates=self.batches > 1)

    def work(self, size: MicroBatchSize) -> MicroBatchWork:
        """The work of a micro-batch, counted once for each size."""
        key = size.shape, size.items
        if key not in self._works:
            self._works[key] = micro_batch_work(self.config, self.task, size)
        return self._works[key]

    def bounds(self, parallel: ParallelConfig) -> Sequence[range]:
        """The blocks of each stage, as a run divides them. Raises UserError for more stages than blocks."""
        key = parallel.pp, parallel.virtual, parallel.folded, tuple(parallel.stages or ())
        if key not in self._bounds:
            bare = self.task.build()[self.task.updates()[0].role]
            self._bounds[key] = self.task.cut(bare, parallel, None, rank=0).bounds
        return self._bounds[key]

    def step(self, parallel: ParallelConfig, explain: bool = False) -> PlannedStep:
        """The step of a layout. Raises UserError for one that does not fit devices or blocks. explain: with what exchanges add."""
        size, pipeline = self.size(parallel), Pipeline.of(parallel)
        work = self.work(size)
        bounds = self.bounds(parallel)
        stages = [work.stage(blocks) for blocks in bounds]
        nodes = [self.rates.nodes(stage, parallel) for stage in stages]
        link = self.rates.outer if self.devices > NODE else self.rates.inner  # stages lie farthest apart
        given = pipeline, size.batches, nodes, work.travels / parallel.group / link
        shown = exposed(*given) if explain else None
        series = exposed(*given, series=True) if explain and pipeline.overlaps else None
        each = [sum(stages[stage].operations for stage in pipeline.own(rank)) for rank in range(pipeline.ranks)]
        shares = tuple(one / sum(each) for one in each)
        return PlannedStep(parallel, size, bounds, shown.step if shown else step_of(*given), shares, shown, series)

    def know(self, step: PlannedStep, alone: StepFigures) -> None:
        """Take the memory of a device that computes all by itself (`shape_figures`) as known, for schedules like that of a step."""
        self._figures[_kind(step)] = alone

    def figures(self, step: PlannedStep) -> tuple[StepFigures, ...]:
        """The memory of each rank, estimated from shapes."""
        key, kind, bounds = step.pipeline, _kind(step), tuple(step.bounds)
        if (key, bounds) not in self._ranks:
            config, size = self.config.model_copy(update={"parallel": step.parallel}), step.size
            if kind not in self._figures:
                self._figures[kind] = shape_figures(
                    config, self.task, size, DeviceSpeeds(), with_swap=False, options=False
                )
            known = self._ends.setdefault((key.ranks, key.folded, bounds), {})
            alone = self._figures[kind]
            self._ranks[key, bounds] = figures_of_ranks(alone, config, self.task, size, self.devices, known)
        return self._ranks[key, bounds]

    def memory(self, step: PlannedStep) -> list[int]:
        """Bytes of each rank at its peak."""
        return [each.plain_peak() for each in self.figures(step)]

    def _fitting(self, layouts: Iterable[dict[str, Any]]) -> list[ParallelConfig]:
        """The layouts of these keys that go together, with one another, the devices and the blocks."""
        own, found = self.config.parallel.model_dump(), []
        for keys in layouts:
            try:
                parallel = ParallelConfig.model_validate({**own, **keys})
                mesh_table(self.devices, parallel.axis_sizes())
                self.bounds(parallel)
            except (ValidationError, UserError):
                continue
            if parallel.exchanges or parallel.schedule != "overlap":
                found.append(parallel)  # where nothing travels, there is nothing to overlap
        return found

    def candidates(self) -> list[ParallelConfig]:
        """The layouts of these devices that differ in stages and schedule alone."""
        most = len(self.work(self.size(self.config.parallel)).blocks)
        every = product(
            [pp for pp in range(2, self.devices + 1) if self.devices % pp == 0 and pp <= most],
            range(1, MOST_STAGES + 1),
            SCHEDULES,
            (False, True),
        )
        return self._fitting(
            {"pp": pp, "virtual": virtual, "schedule": schedule, "extra_warmup": more, "stages": None}
            for pp, virtual, schedule, more in every
        )

    def schedules(self, own: ParallelConfig) -> list[ParallelConfig]:
        """The layouts with the schedules that the stages of a layout can have."""
        more = own.extra_warmup
        return self._fitting({"schedule": each, "extra_warmup": more and each in _PLAIN} for each in SCHEDULES)

    def schedule_lines(self, own: PlannedStep) -> list[str]:
        """A table of the schedules that the stages of a step can have; none where there is no other than its own."""
        layouts = self.schedules(own.parallel)
        if len(layouts) == 1:
            return []
        usual = _PLAIN[own.parallel.virtual > 1] if own.parallel.schedule == "auto" else own.parallel.schedule
        steps = [own if each.schedule == usual else self.step(each, explain=True) for each in layouts]
        kinds = dict.fromkeys(kind for step in steps if step.exposed for kind in step.exposed.seconds)
        head = "".join(f"{f'exposed {kind}':>18}" for kind in kinds)
        lines = [
            f"schedules of parallel.pp={own.parallel.pp} parallel.virtual={own.parallel.virtual}, and bytes of the fullest rank:",
            f"  {'schedule':<12} {'step':>8} {'waits':>6} {head} {'weights':>9} {'activations':>11}",
        ]
        for name, step in zip((each.schedule for each in layouts), steps, strict=True):
            assert step.exposed is not None
            figures = max(self.figures(step), key=StepFigures.plain_peak)
            weights = figures.static.between + figures.static.gradients
            each = "".join(f"{seconds_shown(step.exposed.seconds.get(kind, 0.0)):>18}" for kind in kinds)
            lines.append(
                f"  {name:<12} {seconds_shown(step.simulated.step):>8} {step.simulated.idle:>6.1%} {each} "
                f"{format_bytes(weights):>9} {format_bytes(max(0, figures.plain_peak() - weights)):>11}"
                + ("  that of the config" if step is own else "")
            )
        lines.append(
            "  waits: of the busiest rank; weights: with their gradients and the optimizer's states; activations: the rest"
        )
        return lines + _compiles(self.config, layouts)

    def search(self, limit: int) -> list[tuple[PlannedStep, int]]:
        """The fastest steps of all candidates that fit, with the bytes of their fullest ranks; fastest first."""
        steps = [self.step(each) for each in progress(self.candidates(), "simulate", unit="layout")]
        found: list[tuple[PlannedStep, int]] = []
        with ProgressLine("estimate memory", len(steps), "layout") as line:
            for step in sorted(steps, key=lambda step: step.simulated.step):
                if len(found) < SHOWN and (most := max(self.memory(step))) <= limit:
                    found.append((step, most))
                line.advance()
        return found


def _kind(step: PlannedStep) -> tuple[object, ...]:
    """What the memory of a device that computes all by itself depends on."""
    return step.size.shape, step.size.items, step.pipeline.weights_wait, step.pipeline.splits


def _compiles(config: RunConfig, layouts: Iterable[ParallelConfig]) -> list[str]:
    """A line on schedules that do not go with the config's `train.compile`."""
    named = dict.fromkeys(each.schedule for each in layouts if each.weights_wait and config.train.compile is True)
    return [f"  {', '.join(named)}: only with train.compile=false"] if named else []


def _least(parallel: ParallelConfig) -> int:
    """The fewest devices of a layout."""
    stage = math.lcm(parallel.group * max(1, parallel.dp_shard), parallel.expert_devices)
    return parallel.pp * parallel.replicas * stage


def pipeline_lines(config: RunConfig, task: Task, world: int, alone: StepFigures | None = None) -> list[str]:
    """The lines of `mmspeed check` on the step of a pipeline. task: open. alone: the memory of one device, where it is known."""
    given = Rates.of(config, None, None, None)
    try:
        planner = PipelinePlanner(config, given, world, task=task)
        step = planner.step(config.parallel, explain=True)
        if alone is not None:
            planner.know(step, alone)
        return [
            f"a step of the pipeline: {seconds_shown(step.simulated.step)}, counted at {given.words} (mmspeed plan --pipeline)",
            *step.exposed_lines(),
            *planner.schedule_lines(step),
        ]
    except UserError as error:
        return [f"a step of the pipeline: not counted: {error}"]


def plan_lines(
    config: RunConfig,
    given: Rates,
    devices: int | None = None,
    batches: int | None = None,
    limit: int | None = None,
    drawing: Path | None = None,
) -> list[str]:
    """The lines of `mmspeed plan --pipeline`. limit: bytes of a device for a search of stages and schedules; None: none. drawing: the SVG file to write.

    Raises UserError where the layout does not fit devices or blocks, or no candidate fits the limit.
    """
    planner = PipelinePlanner(config, given, devices, batches)
    parallel = config.parallel
    lines, step = [f"counted at {given.words}; {_NOT_COUNTED}"], None
    if parallel.pp > 1:
        step = planner.step(parallel, explain=True)
        each = planner.devices // parallel.pp
        lines += [
            f"{planner.devices:,} devices, {parallel.pp} ranks of {each:,}: {step.keys}",
            *step.lines(planner.memory(step)),
            *planner.schedule_lines(step),
        ]
    elif limit is None:
        raise UserError(
            "parallel.pp is 1, which makes no pipeline: add parallel.pp=2, or --memory SIZE to search for one"
        )
    if limit is not None:
        found = planner.search(limit)
        if not found:
            raise UserError(f"no pipeline of {planner.devices:,} devices fits {format_bytes(limit)} a device: {_LESS}")
        step = step or found[0][0]
        lines.append(f"the fastest steps within {format_bytes(limit)} a device:")
        lines.append(f"  {'step':>8} {'waits':>6} {'memory':>9}  keys")
        lines += [
            f"  {seconds_shown(one.simulated.step):>8} {one.simulated.idle:>6.1%} {format_bytes(most):>9}  {one.keys}"
            for one, most in found
        ]
        lines += _compiles(config, (one.parallel for one, _ in found))
    if drawing is not None and step is not None:
        spans = step.simulated.spans
        write_text(drawing, pipeline_svg(spans, width=max(WIDTH, BAR * max(map(len, spans)))))
        lines.append(f"drawing: {drawing}")
    return lines
