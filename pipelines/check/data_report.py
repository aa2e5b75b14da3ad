"""`mmspeed check` of a task without a preparation: the models, work and memory of a config, without an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from torch import nn

from mmspeed.config import RunConfig
from mmspeed.data.sampling.order import Order
from mmspeed.data.sampling.weighting import gradient_shares
from mmspeed.device import Device, devices_here
from mmspeed.errors import UserError
from mmspeed.log import format_seconds
from mmspeed.mesh import process_group
from mmspeed.pipelines.domains.base import SampledData
from mmspeed.pipelines.report.policies import policy_lines
from mmspeed.pipelines.report.run_forecast import run_lines
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.protocols import (
    Data,
    Models,
    RunPlace,
    RunWork,
    StepData,
    blocks_of,
    shape_words,
    trainable,
)


@dataclass
class TaskReport:
    """The findings. `problems` make the command fail; all other lines are information."""

    lines_: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The findings in lines."""
        return [*self.lines_, *(f"problem: {problem}" for problem in self.problems)]


def check_task(config: RunConfig, ranks: Sequence[int] | None = None, task: Task | None = None) -> TaskReport:
    """Open a task's data on the CPU, build its models without computing, and describe a run of the config.

    Micro-batches are shown for each number of devices in `ranks` (None: those of this machine). `task`: None: the
    config's. Raises UserError where the task cannot open its data, for a model that lacks part of its protocol, and for a policy of a
    region that its blocks do not have.
    """
    device = Device("cpu", 0)
    report = TaskReport([f"task {config.task}: run {config.name}, in {config.run_dir}"])
    with process_group(device):
        task = task or make_task(config)
        least = config.parallel.least_devices
        place = RunPlace(device, world=least, dealt=config.parallel.dealt(least), folder=config.run_dir)
        task.domain.open(place)
        lines, warnings = task.domain.notes()
        report.lines_ += [*lines, *(f"warning: {warning}" for warning in warnings)]
        models = task.build()
        report.lines_ += [*build_lines(task, models), *policy_lines(task, config, models)]
        del models
        report.lines_ += [
            f"shape class {shape_words(shape)}: {task.domain.tokens(shape):,} tokens an item, {_flops(task.domain.cost(shape))} to train on one"
            for shape in task.domain.shapes()
        ]
        work = _report_steps(report, config, task, place)
        worlds = _report_ranks(report, config, task, ranks)
    works = [] if work is None else [_on(work, *each) for each in worlds.items()]
    report.lines_ += run_lines(config, task, works)
    _report_run(report, config)
    return report


def build_lines(task: Task, models: Models) -> list[str]:
    """A line for each model: its class, blocks and parameters. Raises UserError for one that lacks part of its protocol."""
    learning = {update.role for update in task.updates()}
    return [_model_line(task, role, model, role in learning) for role, model in models.items()]


def _model_line(task: Task, role: str, model: nn.Module, learns: bool) -> str:
    trainable(model, task.name)
    blocks = len(blocks_of(model))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    training = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) if learns else 0
    share = "all of which train" if training == numbers else f"of which {training:,} train"
    return f"{role}: {type(model).__name__}, {blocks} block{'s'[: blocks != 1]}, {numbers:,} parameters, {share}"


def _on(work: RunWork, world: int, micro_batches: int) -> RunWork:
    """The work of one device on several, each with an equal share."""
    items = {shape: count / world for shape, count in work.items.items()}
    return replace(work, world=world, items=items, micro_batches=micro_batches)


def _report_steps(report: TaskReport, config: RunConfig, task: Task, place: RunPlace) -> RunWork | None:
    """Report the first step, and the total of all steps; returns that, as one device's; None where there is no step."""
    steps = config.train.steps
    data = task.data(place)
    try:
        with closing(data.steps(0, 1)) as first:
            step: StepData | None = next(first, None)
        if step is None or not step.counts:
            report.problems.append("the first step has no item: there is nothing to train on")
            return None
        report.problems += [
            f"the first step's divisor '{name}' is {value:g}: it has no item that counts, so it has no mean"
            for name, value in step.divisors.items()
            if value is not None and not value > 0
        ]
        usage = task.domain.usage(step)
        shares = _gradient_lines(config, data)
        epochs = data.locate(steps - 1).epoch + 1
        size = data.size
    finally:
        data.close()
    work = 3 * usage.forward.matmul  # backward is twice the forward pass
    report.lines_.append(
        f"steps: {steps:,}, over {epochs:,} epoch{'s'[: epochs != 1]}; the first has {usage.items:,} items of {usage.tokens:,} tokens, "
        f"{_flops(work)}; all about {_flops(work * steps)}{_least_time(config, work * steps)}"
    )
    if size.left_out:
        report.lines_.append(f"left out of the first epoch: {size.left_out:,} items without a token to predict")
    report.lines_ += shares
    items = {shape: count * steps for shape, count in step.counts.items()}
    return RunWork(1, epochs, f"{size.samples:,} items", items, 1.0)


def _gradient_lines(config: RunConfig, data: Data) -> list[str]:
    """The share of each shape class in the gradients of the first epoch; nothing for data without an order by shape classes."""
    weights = data.weights if isinstance(data, SampledData) else None
    if weights is None or not isinstance(weights.order, Order):  # packs are of one shape class
        return []
    plan, shapes = weights.order.whole_epoch()
    shares = gradient_shares(plan, shapes, weights.weighting, weights.tokens)
    how = f"share of gradients (objective.weighting: {config.weighting})"
    if len(shares) == 1:
        return [f"{how}: the samples are of one shape class, which has all of them"]
    return [f"{how} of shape class {shape_words(shape)}: {share:.3f}" for shape, share in shares.items()]


def _report_ranks(report: TaskReport, config: RunConfig, task: Task, ranks: Sequence[int] | None) -> dict[int, int]:
    """Report the micro-batches of the first step on each number of devices, and requested numbers that the layout does not allow.

    Returns the micro-batches of each number that it allows.
    """
    worlds = {}
    for world in [devices_here(config.device.kind, config.parallel.least_devices)] if ranks is None else ranks:
        try:
            config.parallel.check_world(world)
        except UserError as error:
            report.problems.append(str(error))
            continue
        groups, dealt = config.parallel.groups(world), config.parallel.dealt(world)
        place = RunPlace(Device("cpu", 0), world=world, groups=groups, dealt=dealt, folder=config.run_dir)
        data = task.data(place)
        try:
            shapes = data.shapes(0)
        finally:
            data.close()
        worlds[world] = len(shapes)
        words = ", ".join(f"{each.items} x {shape_words(each.shape)}" for each in shapes[:4])
        more = f", ... ({len(shapes)} micro-batches)" if len(shapes) > 4 else ""
        report.lines_.append(
            f"on {world} device{'s'[: world != 1]}: a device takes {words or 'nothing'}{more} in the first step"
        )
    return worlds


def _report_run(report: TaskReport, config: RunConfig) -> None:
    """Report an existing run of this name, and whether this config resumes it."""
    folder = RunFolder(config.run_dir)
    if not folder.config_file.exists():
        return
    try:
        changed = folder.check_same(config)
    except UserError as error:
        report.problems.append(str(error))
        return
    from mmspeed.loop.checkpoint.storage import steps_in

    done = max(steps_in(folder.checkpoints), default=0)
    state = "is finished" if done >= config.train.steps else "goes on"
    but = f"; changed since it was saved: {', '.join(changed)}" if changed else ""
    report.lines_.append(f"{config.run_dir} {state} at step {done}{but}")


def _least_time(config: RunConfig, flops: float) -> str:
    peak = config.device.peak_tflops
    return "" if peak is None else f", at least {format_seconds(flops / peak / 1e12)} at {peak:g} TFLOP/s"


def _flops(count: float) -> str:
    """A number of operations as text, such as `1.2 GFLOP`."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if count < 1000 or unit == "E":
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    raise AssertionError("unreachable")
