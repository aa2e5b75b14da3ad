"""The time of a config's step on this machine, by a few real ones of synthetic items: in seconds, or the reason why it is not measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from mmspeed.config import RunConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import PEAK_FLOPS, UTILISATION, Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, format_seconds
from mmspeed.mesh import process_group
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_estimate import MemoryPlan
from mmspeed.pipelines.tuning.profile import memory_limit
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import MicroBatchSize, source_of

ACCELERATOR = "H100"  # of which times are told where no step is measured
SECONDS = 4.0  # that the timed step may take
SLOWER = 4  # times the time at a device's peak that a step of one item may take, the first one included
DRAWN = 1e8  # initial numbers that a processor draws in a second
STATE = 16  # bytes of a weight, its gradient and moments
KEPT = 0.03  # most bytes that a block keeps for an operation, of blocks of width 64


@dataclass(frozen=True)
class StepTime:
    """The time of a step of the micro-batch `of`, as `items` of its items took on `device`, and their bytes at the peak if asked for."""

    of: MicroBatchSize
    items: int
    seconds: float
    peak: int | None
    device: Device
    flops: float  # a second

    @property
    def words(self) -> str:
        """The figure, and how it is known."""
        seconds = f"{self.seconds:.2g} s" if self.seconds < 10 else format_seconds(self.seconds)
        return f"about {seconds}, measured here on {self.device.name}{'' if self.items == self.of.items else ' with one item'}"


class UnmeasuredError(UserError):
    """The reason why a step is not measured."""


def measure_step(config: RunConfig, task: Task, step: MicroBatchSize, plan: MemoryPlan | None) -> StepTime:
    """Time a step on one device of this machine, in a few seconds, without torch.compile; and count its memory if no plan tells it.

    Raises UnmeasuredError where the device is not here or too small, several compute an item together, the policies are chosen at the
    start of training, or a step would take longer.
    """
    parallel, cost = config.parallel, task.domain.cost(step.shape)
    try:
        device = pick(config.device.kind)
    except UserError as error:
        raise UnmeasuredError(str(error)) from None
    if parallel.group > 1:
        raise UnmeasuredError(f"{parallel.group} devices compute an item together ({parallel.group_in_words()})")
    if config.memory.chooses:
        raise UnmeasuredError("memory's budget chooses policies at the start of training, by steps that it measures")
    models = task.build()
    limit = min(memory_limit(device, None), device.free_memory_bytes())
    if plan is not None:
        wanted = plan.alone.plain_peak() * len(models)
        if plan.experts > 1:  # those of other processes too
            wanted += STATE * sum(p.numel() for model in models.values() for p in model.parameters())
    else:  # an accelerator whose memory runs out says so, and harms nobody
        wanted = STATE * sum(p.numel() for model in models.values() for p in model.parameters())
        wanted += int(KEPT * cost * step.items) if device.kind == "cpu" else 0
    if wanted > limit:
        raise UnmeasuredError(
            f"it takes about {format_bytes(wanted)} of memory, more than the {format_bytes(limit)} that a trial may take on {device.name}"
        )
    numbers = sum(p.numel() for model in models.values() if source_of(model) is None for p in model.parameters())
    expected = SLOWER * cost / device.peak_flops(parse_dtype(config.device.dtype))[0] + numbers / DRAWN
    if expected > 2 * SECONDS:
        raise UnmeasuredError(f"one item alone would take about {format_seconds(expected)} on {device.name}")
    plain = {"parallel": ParallelConfig(), "train": config.train.model_copy(update={"compile": False})}
    items = 1
    device.activate()
    try:
        with process_group(device):
            steps = SyntheticStep(config.model_copy(update=plain), task, device, text_tokens=task.domain.longest_text())
            seconds = steps.attempt(lambda: [steps.seconds(step.shape, 1) for _ in range(2)][1])
            if seconds is not None and 1 < step.items <= SECONDS / seconds:
                items, seconds = step.items, steps.attempt(lambda: steps.seconds(step.shape, step.items))
            peak = None if seconds is None or plan is not None else steps.peak(step.shape, items)
    except UserError as error:
        raise UnmeasuredError(str(error)) from None
    if seconds is None:
        raise UnmeasuredError(f"the memory of {device.name} ran out")
    return StepTime(step, items, seconds * step.items / items, peak, device, items * cost / seconds)


def rates(config: RunConfig) -> list[tuple[str, float]]:
    """(where, operations a second) of well-tuned training: on the config's device where that is here, else on a usual accelerator."""
    dtype, share = parse_dtype(config.device.dtype), f" at {UTILISATION:.0%} of the peak of"
    if config.device.peak_tflops is not None:
        return [(f"{share} device.peak_tflops", UTILISATION * config.device.peak_tflops * 1e12)]
    rates = []
    with suppress(UserError):  # the device is not here
        device = pick(config.device.kind)
        rates.append((f"{share} {device.name}", UTILISATION * device.peak_flops(dtype)[0]))
        if device.kind != "cpu":
            return rates
    peak = PEAK_FLOPS[ACCELERATOR][config.device.dtype == "float32"]
    return [*rates, (f"{share} an {ACCELERATOR} ({config.device.dtype})", UTILISATION * peak)]
