"""The memory report of a config's training step: its measurement and its plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.memory.planning.peak import local_bytes
from mmspeed.memory.planning.report import CATEGORIES, MemoryReport, host_pools
from mmspeed.parallel import unwrap
from mmspeed.pipelines.run.assembly import Assembly
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import ShapeClass, shape_words

MEMORY_FILE = "memory.json"  # in a run's folder; the report is under "report"

COLORS = {
    "parameters": "#2f6db5",
    "gradients": "#8fb8e0",
    "optimizer": "#3d8f7a",
    "average": "#9fd0c1",
    "activations": "#d9812e",
    "temporary": "#f0c489",
    "host": "#9aa5b1",
}
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def measure_report(trial: SyntheticStep, bucket: ShapeClass, batch: int) -> MemoryReport:
    """Measure the memory of a training step of `batch` samples on this process's device, after a first step that makes the states.

    Collective: every process of the run calls it. Raises UserError with `train.compile`.
    """
    from mmspeed.memory.planning.tracked import measure_step  # imports much

    if trial.config.train.compile is True:
        raise UserError("the memory of compiled blocks cannot be told apart: measure with train.compile: false")
    parts = trial.parts
    trial.run(bucket, batch)
    counted = trial.peak(bucket, batch)
    for pool in host_pools(parts.model):
        pool.peak = pool.used
    return measure_step(
        unwrap(parts.model),
        parts.optimizer,
        lambda: trial.run(bucket, batch),
        device=trial.device,
        setting=f"{shape_words(bucket)}, {batch} a device",
        average=() if parts.ema is None or parts.ema.on_host else parts.ema.tensors.values(),
        host=lambda: host_bytes(parts),
        counted_peak=counted,
    )


def host_bytes(parts: Assembly) -> dict[str, int]:
    """Bytes of a training in the host's memory: the peak of swapped activations, and the states that stay there between steps."""
    nbytes = {"activations": sum(pool.peak for pool in host_pools(parts.model))}
    if not isinstance(parts.optimizer, Optimizer):
        nbytes["optimizer"] = sum(parts.optimizer.host_bytes().values())
    if parts.ema is not None and parts.ema.on_host:
        nbytes["average"] = local_bytes(parts.ema.tensors.values())
    return nbytes


def read_report(folder: Path) -> MemoryReport | None:
    """The report in a run's folder; None where there is none. Raises UserError for a damaged one."""
    path = folder / MEMORY_FILE
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8")).get("report")
        return None if report is None else MemoryReport.from_json(report)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, or train the run again to write it") from None


def report_figure(report: MemoryReport) -> Any:
    """A matplotlib figure: a stacked bar of the peak's categories (and of the host), and the bytes that each layer keeps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 6.8), layout="constrained")
    above, below = figure.subplots(2, 1)
    _draw_peak(above, report)
    _draw_layers(below, report)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.25)
    return figure


def _draw_peak(axis: Any, report: MemoryReport) -> None:
    unit, scale = _unit(max(report.peak, sum(report.host.values())))
    base = 0.0
    for name in CATEGORIES:
        value = report.categories[name] / scale
        if value:
            share = f"{name}  {format_bytes(report.categories[name])}"
            axis.bar(["device"], [value], 0.55, bottom=base, color=COLORS[name], label=share)
            base += value
    base = 0.0
    for name, count in report.host.items():
        label = f"host: {name}  {format_bytes(count)}"
        axis.bar(["host"], [count / scale], 0.55, bottom=base, color=COLORS[name], alpha=0.55, hatch="//", label=label)
        base += count / scale
    axis.set_xlim(-0.6, 1.6 if report.host else 0.6)
    axis.set_ylabel(unit)
    where = f"{report.phase} of {report.module}" if report.module else report.phase
    axis.set_title(f"peak {format_bytes(report.peak)}\nin the {where}", fontsize=10, loc="left")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_layers(axis: Any, report: MemoryReport) -> None:
    unit, scale = _unit(max((layer.kept for layer in report.layers), default=0))
    names = [layer.name for layer in report.layers]
    axis.bar(range(len(names)), [layer.kept / scale for layer in report.layers], 0.8, color=COLORS["activations"])
    step = max(1, len(names) // 12)
    axis.set_xticks(range(0, len(names), step), names[::step], rotation=60, ha="right", fontsize=7.5)
    axis.set_ylabel(unit)
    axis.set_title(f"kept for backward {format_bytes(report.kept)}\nby layer", fontsize=10, loc="left")


def _unit(largest: float) -> tuple[str, float]:
    return next(((name, scale) for name, scale in BYTES.items() if largest >= scale), ("B", 1.0))
