"""Compare a layout's results with those of one process, and report the verdict of `mmspeed check --parallel`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmspeed.config.parallel import AXES, ParallelConfig
from mmspeed.log import format_bytes, format_seconds
from mmspeed.pipelines.check.worker import Arrays, StepReport, WorkerReport
from mmspeed.protocols import SmallRun

WORST = 5  # gradients in the report
# a smaller gradient is compared with this share of the largest: it may be rounding alone, as that of queries over one frame is
LEAST = 1e-2

# Of float32: sums in another order differ by a few units in the last place (6e-8). Bfloat16 rounds by up to 4e-3 wherever layers meet,
# in another place on each layout, and sums that cancel out amplify it: so one process in float32 measures the error of bfloat16 in one
# process, and the layout may differ by `NOISE` times that error plus the number here.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
NOISE = 4.0
NORM_TOLERANCE = 1e-4  # torch sums the squares of a large gradient in float32, which alone is off by 1e-5


@dataclass(frozen=True)
class GradientGap:
    """The relative distance of a parameter's gradient from that of one process, and the allowed one.

    `share`: the share of the true gradient in it (1 at best).
    """

    name: str
    relative: float
    absolute: float
    share: float
    allowed: float

    @property
    def excess(self) -> float:
        """The gap as a multiple of the allowed one; infinite where it is not finite."""
        return self.relative / self.allowed if math.isfinite(self.relative) else math.inf


@dataclass(frozen=True)
class StepCheck:
    """A kind of step at the layout and on one process. `gaps` are of all parameters, worst first; `sent`: bytes by "kind axis".

    `loss_allowed` and `norm_allowed`: their allowed relative distances from one process.
    """

    kind: str
    loss: float
    loss_alone: float
    norm: float
    norm_alone: float
    loss_allowed: float
    norm_allowed: float
    gaps: list[GradientGap]
    sent: dict[str, int]
    problems: list[str]

    @property
    def loss_gap(self) -> float:
        """Relative difference of the losses."""
        return _relative(self.loss, self.loss_alone)

    @property
    def norm_gap(self) -> float:
        """Relative difference of the gradients' norms."""
        return _relative(self.norm, self.norm_alone)


@dataclass(frozen=True)
class SelfCheck:
    """The result of a check. `about`: a description of the run; `problems`: all that is wrong; `hint`: where to look for the cause."""

    layout: str
    processes: int
    dtype: str
    tolerance: float
    about: list[str]
    steps: list[StepCheck]
    problems: list[str]
    hint: str | None
    seconds: float = field(compare=False, default=0.0)

    @property
    def passed(self) -> bool:
        """True where the layout computes what one process computes."""
        return not self.problems

    def lines(self) -> list[str]:
        """The report as lines of text."""
        took = f" ({format_seconds(self.seconds)})" if self.seconds else ""
        lines = [f"{self.layout}: {self.processes} processes against one, on the CPU{took}"]
        lines += [f"  {line}" for line in self.about]
        lines += ["", f"  {'':8}  {'':9}  {'one process':>12}  {'layout':>12}  {'relative':>8}"]
        for step in self.steps:
            lines.append(_row(step.kind, "loss", step.loss_alone, step.loss, step.loss_gap))
            lines.append(_row("", "gradient", step.norm_alone, step.norm, step.norm_gap))
        for step in self.steps:
            wide = max((len(gap.name) for gap in step.gaps[:WORST]), default=0)
            lines += [
                "",
                f"  {step.kind}: the {min(WORST, len(step.gaps))} gradients of {len(step.gaps)} that differ most",
            ]
            lines += [
                f"    {gap.name:<{wide}}  {gap.relative:.1e} relative, {gap.absolute:.1e}" for gap in step.gaps[:WORST]
            ]
            sent = [f"{what} {format_bytes(count)}" for what, count in sorted(step.sent.items())]
            lines.append(f"    sent: {', '.join(sent) or 'nothing'}")
        lines += ["", *self._verdict()]
        return lines

    def _verdict(self) -> list[str]:
        if self.passed:
            noise = "" if self.dtype == "float32" else f" and the error of {self.dtype} in one process"
            return [
                f"PASSED: the layout computes what one process computes (within {self.tolerance:g}{noise}).",
                "Where training goes wrong all the same, look at the data, the objective or train.lr.",
            ]
        return [
            *(f"  wrong: {problem}" for problem in self.problems),
            *([f"  {self.hint}"] if self.hint else []),
            "FAILED: the layout does not compute what one process computes. This is mmspeed's mistake, not your config's: do not",
            "train with this layout, and report it with this output, the config and what `mmspeed doctor` prints.",
        ]


def processes(parallel: ParallelConfig) -> int:
    """The product of the axes."""
    return math.prod(parallel.sizes().values())


def named(parallel: ParallelConfig) -> str:
    """The layout in words: the axes above 1, and other settings that are not the default."""
    default = ParallelConfig().model_dump()
    axes = [f"{axis}={size}" for axis, size in parallel.sizes().items() if size > 1]
    others = [
        f"{name}={value}"
        for name, value in parallel.model_dump().items()
        if name not in AXES and value != default[name]
    ]
    return " ".join(axes + others)


def compare(
    small: SmallRun, at_layout: WorkerReport, truth: WorkerReport, exact: WorkerReport | None = None
) -> SelfCheck:
    """The verdict on the reports of a layout and of one process. `exact`: that of one process in float32, where they compute in less."""
    config = small.config
    dtype, parallel = config.device.dtype, config.parallel
    tolerance = TOLERANCES[dtype]
    problems, steps = list(at_layout.problems), []
    failing: list[GradientGap] = []
    for here, alone, best in zip(at_layout.steps, truth.steps, (exact or truth).steps, strict=True):
        step = _compared(here, alone, best, tolerance)
        steps.append(step)
        over = [gap for gap in step.gaps if gap.excess > 1]
        failing += over
        problems += [f"{step.kind}: {problem}" for problem in step.problems]
        for what, gap, allowed in (
            ("loss", step.loss_gap, step.loss_allowed),
            ("gradient norm", step.norm_gap, step.norm_allowed),
        ):
            if not gap <= allowed:
                problems.append(f"{step.kind}: the {what} differs by {gap:.1e}, more than {allowed:.1g}")
        if over:
            worst, share = over[0], f"{len(over)} of {len(step.gaps)} gradients differ"
            problems.append(f"{step.kind}: {share} by more than {worst.allowed:.1g}, most that of {worst.name}")
    sharded = parallel.dp_shard * parallel.sequence > 1
    if at_layout.strategy == "fsdp" and sharded and at_layout.held >= at_layout.parameters:
        problems.append("fsdp: a process holds all parameters, none is sharded")
    return SelfCheck(
        layout=named(parallel),
        processes=processes(parallel),
        dtype=dtype,
        tolerance=tolerance,
        about=_about(small, at_layout),
        steps=steps,
        problems=problems,
        hint=hint(failing, steps, at_layout.order),
    )


def _compared(here: StepReport, alone: StepReport, best: StepReport, tolerance: float) -> StepCheck:
    noise = {gap.name: gap.relative for gap in gaps_of(alone.grads, best.grads)}
    problems = list(here.problems)
    if not math.isfinite(alone.loss):
        problems.append(f"the loss of synthetic samples is {alone.loss} on one process: this is not the layout")
    problems += [f"no gradient of {name} at the layout" for name in sorted(alone.grads.keys() - here.grads.keys())]
    problems += [f"a gradient of {name} at the layout only" for name in sorted(here.grads.keys() - alone.grads.keys())]
    return StepCheck(
        kind=here.kind,
        loss=here.loss,
        loss_alone=alone.loss,
        norm=here.grad_norm,
        norm_alone=alone.grad_norm,
        loss_allowed=tolerance + NOISE * _relative(alone.loss, best.loss),
        norm_allowed=max(tolerance, NORM_TOLERANCE) + NOISE * _relative(alone.grad_norm, best.grad_norm),
        gaps=gaps_of(
            here.grads,
            alone.grads,
            {name: tolerance + NOISE * off for name, off in noise.items() if math.isfinite(off)},
        ),
        sent=here.sent,
        problems=problems,
    )


def gaps_of(here: Arrays, alone: Arrays, allowed: Mapping[str, float] | None = None) -> list[GradientGap]:
    """The gap of each parameter that has a gradient in both, the worst first."""
    least = LEAST * max((float(np.abs(grad).max()) for grad in alone.values()), default=0.0)
    gaps = []
    for name in here.keys() & alone.keys():
        grad, true = here[name].astype(np.float64), alone[name].astype(np.float64)
        absolute = float(np.abs(grad - true).max())
        size = float((true * true).sum())
        share = float((grad * true).sum()) / size if size else 1.0
        scale = max(float(np.abs(true).max()), least)
        relative = absolute / scale if scale else math.inf if absolute else 0.0
        gaps.append(GradientGap(name, relative, absolute, share, (allowed or {}).get(name, 1.0)))
    return sorted(gaps, key=lambda gap: (-gap.excess, gap.name))


def hint(failing: list[GradientGap], steps: list[StepCheck], order: Sequence[str]) -> str | None:
    """A line on what the gradients that differ have in common; None where none does. `order`: parameters from input to output."""
    if not failing:
        return None
    shares = [gap.share for gap in failing]
    everything = len(failing) == sum(len(step.gaps) for step in steps)
    if everything and max(shares) - min(shares) < 1e-3 * abs(shares[0]):
        return f"every gradient is {shares[0]:.4g} times that of one process: somewhere a sum is taken for a mean"
    names = {gap.name for gap in failing}
    roles = sorted({_role(name) for name in names})
    what = f"only gradients of {', '.join(roles)} differ" if len(roles) <= 3 else f"{len(names)} gradients differ"
    if any(not step.loss_gap <= step.loss_allowed for step in steps):
        return f"{what}; a loss differs too, so the mistake is in forward"
    return f"{what}; the losses are equal, so the mistake is in backward, at {', '.join(_nearest_output(names, order))}"


def _nearest_output(names: set[str], order: Sequence[str]) -> list[str]:
    """The layers where wrong gradients begin: backward goes from the output to the input."""
    lists = list(dict.fromkeys(block[0] for name in order if (block := _block(name))))  # in the order of their calls
    places = [place for place, name in enumerate(order) if _block(name)]
    behind = names & set(order[max(places, default=-1) + 1 :])
    if behind:
        return sorted({_layer(name) for name in behind})
    wrong = {name: (lists.index(block[0]), block[1]) for name in names if (block := _block(name)) and block[0] in lists}
    last = [name for name, block in wrong.items() if block == max(wrong.values())]
    return sorted({_layer(name) for name in last or names})


def _block(name: str) -> tuple[str, int] | None:
    """The list of blocks that a parameter belongs to, and the block's number in it; None outside of blocks."""
    match = re.match(r"(\w*blocks|layers|mtp)\.(\d+)\.", name)
    return (match[1], int(match[2])) if match else None


def _layer(name: str) -> str:
    """The name of a parameter's layer."""
    return name.rpartition(".")[0] or name


def _role(name: str) -> str:
    """The name of a parameter's layer, with `*` for the block's number."""
    return re.sub(r"\.\d+\.", ".*.", _layer(name))


def _about(small: SmallRun, at_layout: WorkerReport) -> list[str]:
    config = small.config
    settings = [config.device.dtype, f"strategy {at_layout.strategy}", *small.settings]
    settings += ["recompute"] if "recompute" in config.memory.activation_policy.values() else []
    settings += ["compiled"] if config.train.compile is True else []
    return [
        f"model, made small: {small.model}; {', '.join(settings)}",
        *small.items,
        *at_layout.lines,
        f"a process holds {at_layout.held:,} of {at_layout.parameters:,} parameters at most",
        *small.remarks,
    ]


def _row(kind: str, what: str, alone: float, here: float, gap: float) -> str:
    return f"  {kind:8}  {what:9}  {alone:>12.6g}  {here:>12.6g}  {gap:>8.1e}"


def _relative(here: float, alone: float) -> float:
    if here == alone:
        return 0.0
    return abs(here - alone) / abs(alone) if alone else math.inf
