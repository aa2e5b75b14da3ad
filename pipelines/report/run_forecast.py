"""The memory and time of a run before it begins, in lines of `mmspeed check`: of a step, and of the whole training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mmspeed.config import RunConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, format_seconds
from mmspeed.parallel import check_division
from mmspeed.parallel.stage_weights import check_waiting
from mmspeed.pipelines.report.pipeline_plan import pipeline_lines
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_estimate import MemoryPlan, plan_memory
from mmspeed.pipelines.tuning.step_time import StepTime, UnmeasuredError, measure_step, rates
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.simulate import reckoned
from mmspeed.protocols import RunPlace, RunWork, shape_words

MANY_EPOCHS = 150  # more are warned of
HEAD_WIDTHS = (64, 128, 192, 256)  # that accelerators' attention kernels compute in
MOST_STANDSTILL = 0.3  # of a pipeline; more is warned of
LEAST_PADDING = 0.01  # of a step's operations, which are warned of


def run_lines(config: RunConfig, task: Task, works: Sequence[RunWork]) -> list[str]:
    """Lines about the largest micro-batch's memory and time, and the time of the training on each number of devices; and warnings.

    The task is open, with data or without. Raises UserError as `plan_memory` for a memory budget.
    """
    parallel = config.parallel
    worlds = [work.world for work in works] or [parallel.least_devices]
    for world in worlds if parallel.divides_models else ():
        for model in task.domain.outlines().values():
            check_division(model, parallel, world)
    few = [check_waiting(model, parallel) for model in task.domain.outlines().values()] if parallel.weights_wait else []
    world = worlds[0]
    place = RunPlace(Device("cpu", 0), world=world, dealt=parallel.dealt(world), groups=parallel.groups(world))
    step, plan, measured, unknown = task.domain.largest_micro_batch(place), None, None, ""
    with_swap = config.device.kind != "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the speed of kernels on a CPU
        try:
            plan = plan_memory(config, task=task, step=step, world=world, with_swap=with_swap, options=False)
        except UserError as error:
            if config.memory.chooses:
                raise
            unknown = str(error)
        try:
            measured = measure_step(config, task, step, plan)
            time = measured.words
        except UnmeasuredError as error:
            time = f"not measured: {error}"
    of = f"of a step of {shape_words(step.shape)} x {step.items}"
    lines = [f"memory {of}: not known: {unknown}"] if plan is None else plan.lines()
    if measured is not None and measured.peak is not None:
        some = "" if measured.items == step.items else " with one item"
        lines = [f"memory {of}: {format_bytes(measured.peak)}, measured here{some}"]
    lines.append(f"time {of}: {time}")
    if parallel.pp > 1:
        lines += pipeline_lines(config, task, world, None if plan is None else plan.alone)
    lines += [_training(config, task, work, measured) for work in works]
    cautions = [*filter(None, few), *_cautions(config, task, works, plan, measured)]
    return [*lines, *(f"warning: {warning}" for warning in cautions)]


def _training(config: RunConfig, task: Task, work: RunWork, measured: StepTime | None) -> str:
    """The line about the whole training on some devices."""
    flops = sum(count * task.domain.cost(shape) for shape, count in work.items.items())
    known = rates(config) if measured is None else [("", measured.flops)]
    times = " or ".join(f"about {_duration(flops / rate)}{where}" for where, rate in known)
    more = ", without exchanges" if work.world > 1 else ""
    if Pipeline.of(config.parallel).ranks > 1:
        more += f" and the {_standstill(config, work):.0%} for which the pipeline stands still"
    return (
        f"training on {work.world:,} device{'s'[: work.world != 1]}: {config.train.steps:,} steps, {_epochs(work.epochs)} of "
        f"{work.of}; {times}{more}"
    )


def _standstill(config: RunConfig, work: RunWork) -> float:
    """The share of a step for which a pipeline stands still."""
    return reckoned(Pipeline.of(config.parallel), max(1, round(work.micro_batches))).idle


def _duration(seconds: float) -> str:
    """A long time, without digits that an estimate does not have."""
    if seconds > 2 * 86_400:
        return f"{seconds / 86_400:,.0f} days"
    return format_seconds(seconds if seconds < 600 else 60 * round(seconds / 60)).removesuffix(" 0 s")


def _epochs(count: float) -> str:
    return f"{count:,.0f} epochs" if count >= 10 else f"{count:.2g} epoch{'s'[: count != 1]}"


def _cautions(
    config: RunConfig, task: Task, works: Sequence[RunWork], plan: MemoryPlan | None, measured: StepTime | None
) -> list[str]:
    """Sentences about pipelines that stand still, many epochs, and heads whose width attention kernels pad."""
    found, pipeline = list[str](), Pipeline.of(config.parallel)
    for work in works if pipeline.ranks > 1 else ():
        idle, short = _standstill(config, work), work.micro_batches < pipeline.least
        if idle > MOST_STANDSTILL or short:
            count = f"{work.micro_batches:.1f}".removesuffix(".0")
            fills = (
                f", fewer than the {pipeline.least} that fill parallel.schedule {pipeline.schedule}" if short else ""
            )
            found.append(
                f"a step on {work.world:,} devices has {count} micro-batch{'es'[: 2 * (count != '1')]}{fills}, and parallel.pp {pipeline.ranks} stands "
                f"still for {idle:.0%} of it: lower train.micro_batch_size, or make steps larger, up to {4 * pipeline.ranks} micro-batches"
            )
    if works and (epochs := works[0].epochs) > MANY_EPOCHS:
        steps = round(config.train.steps * MANY_EPOCHS / epochs)
        such = f" (train.steps: {steps} are {MANY_EPOCHS} epochs)" if steps else ""
        found.append(
            f"{_epochs(epochs)} of {works[0].of}: the model sees the same data again and again, and learns them by heart; take more of "
            f"them, or fewer steps{such}"
        )
    here = None if measured is None else measured.device.kind
    if plan is not None and config.device.kind != "cpu" and here != "cpu":
        found += _padding(task, plan)
    return found


def _padding(task: Task, plan: MemoryPlan) -> list[str]:
    """A sentence about heads that are padded, and what that adds to a step's operations."""
    widths, work = plan.alone.head_widths, task.domain.work(plan.step.shape)
    padded = {width: next((wide for wide in HEAD_WIDTHS if wide >= width), width) for width in widths}
    odd = sorted(width for width in widths if padded[width] != width)
    factor = sum(n * padded[width] / width for width, n in widths.items()) / max(1, sum(widths.values())) - 1
    added = factor * work.attention / max(1.0, work.matmul)
    if added < LEAST_PADDING:
        return []
    heads = ", ".join(f"{width} to {padded[width]}" for width in odd)
    return [
        f"attention heads of width {', '.join(map(str, odd))}: accelerators' kernels pad them ({heads}), which adds {added:.0%} to the "
        "operations of a step; widths of 64 or 128 need no padding"
    ]
