"""`mmspeed report RUN`: one self-contained HTML page with loss curves, throughput, samples and the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.config import Config, RunConfig, dump_config
from mmspeed.log import format_bytes, format_seconds, read_metrics
from mmspeed.models.sections import words_of
from mmspeed.pages import data_uri, figure_uri, render
from mmspeed.pipelines.report.memory_page import read_report, report_figure
from mmspeed.pipelines.run.run_folder import RunFolder, write_text
from mmspeed.redaction import redacted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 12  # curves of a plot that have a legend
SHOWN_SAMPLES = 6  # newest steps whose videos are on the page
RANK_PARTS = {
    "compute": "computing, s a step",
    "data": "waiting for data, s a step",
    "exchange": "waiting for exchanges, s a step",
}
Row = Mapping[str, Any]


def write_report(run: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    The page needs no network and no other file. Raises UserError when `run` is not a run.
    """
    from mmspeed.loop.checkpoint.load import recorded

    folder = RunFolder.open(run)
    config = folder.run_config()
    rows = read_metrics(folder.metrics)
    steps, validations = ([row for row in rows if row.get("kind") == kind] for kind in ("train", "validation"))
    reached = max((entry["step"] for entry in (*rows, *recorded(folder.checkpoints)) if "step" in entry), default=0)
    memory = read_report(folder.root)
    figures = {
        "loss": _loss_figure(steps, validations),
        "parts": _parts_figure(steps),
        "terms": _terms_figure(steps),
        "quantiles": _quantile_figure(validations),
        "throughput": _throughput_figure(steps),
        "ranks": ranks_figure(steps),
        "memory": None if memory is None else report_figure(memory),
        "attention": _attention_figure(steps),
    }
    page = render(
        "run.html",
        title=f"{config.name} - mmspeed",
        name=config.name,
        description=_description(config),
        tiles=_tiles(steps, validations, reached),
        last=steps[-1] if steps else {},
        validation=_validation_numbers(validations),
        validated=validations[-1]["step"] if validations else 0,
        plots={name: None if figure is None else figure_uri(figure) for name, figure in figures.items()},
        parts=[] if figures["parts"] is None else [axis.get_title() for axis in figures["parts"].axes],
        slow=[
            (row["step"], one["rank"], one["host"], f"{one['factor']:.2f} x")
            for row in steps
            for one in row.get("slow_ranks", ())
        ],
        memory=[] if memory is None else memory.lines(),
        samples=_samples(folder.samples),
        makes_videos=isinstance(config, Config),
        config=redacted(dump_config(config)),
    )
    write_text(folder.report, page)
    return folder.report


def _description(config: RunConfig) -> str:
    """A short description of the model and its objective, or of the task."""
    if isinstance(config, Config):
        return f"model {words_of(config.model)} \u00b7 objective {config.objective.kind}"
    return f"task {config.task}"


def _numbers(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _tiles(steps: Sequence[Row], validations: Sequence[Row], reached: int) -> list[tuple[str, str]]:
    """(label, number) of the tiles; none before the first step is logged."""
    if not steps:
        return []
    last = steps[-1]
    tail = steps[-max(1, len(steps) // 10) :]
    losses = [(row["loss"], row["steps"]) for row in tail if row.get("loss") is not None]
    counted = sum(count for _, count in losses)
    mean = f"{sum(loss * count for loss, count in losses) / counted:.4f}" if counted else "not finite"
    counts = {"skipped_steps": "skipped steps", "left_out_samples": "samples left out", "roll_backs": "roll-backs"}
    return [
        ("step", str(reached)),
        ("loss (mean of the last tenth)", mean),
        ("held-out loss", f"{validations[-1]['loss']:.4f}" if validations and validations[-1].get("loss") else "none"),
        ("samples/s", f"{last['samples_per_s']:.2f}"),
        ("tokens/s", f"{last['tokens_per_s']:.0f}"),
        ("MFU", f"{last['mfu']:.1%}" if last.get("mfu") is not None else "unknown"),
        ("waiting for data", f"{last['data_wait']:.1%}"),
        ("peak memory", format_bytes(last["peak_memory_bytes"])),
        ("training time", format_seconds(last["elapsed_seconds"])),
        *((name, str(last[key])) for key, name in counts.items() if last.get(key)),
    ]


def _moving_mean(values: list[float], window: int) -> list[float]:
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


def save_loss_curve(run: str | Path, path: Path) -> None:
    """Write the losses of a run, over training and held out, as a PNG. Raises UserError when `run` is not a run."""
    rows = read_metrics(RunFolder.open(run).metrics)
    figure = _loss_figure(*([row for row in rows if row.get("kind") == kind] for kind in ("train", "validation")))
    figure.savefig(path, dpi=110)


def _figure(height: float, titles: Sequence[str], columns: int = 3) -> tuple[Figure, list[Any]]:
    """A figure of the page's width, and its axes, one for each title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = [figure.add_subplot(-(-len(titles) // columns), columns, place) for place in range(1, len(titles) + 1)]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
    return figure, axes


def _loss_figure(steps: Sequence[Row], validations: Sequence[Row]) -> Figure:
    figure, (axis,) = _figure(3.6, [""], 1)
    x, y = _numbers(steps, "loss")
    if x:
        axis.plot(x, y, ".", color="#9db7d5", markersize=3, label="mean of a row")
        axis.plot(x, _moving_mean(y, max(1, len(y) // 20)), color="#1f5fa8", label="moving mean")
    x, y = _numbers(validations, "loss")
    if x:
        axis.plot(x, y, "o-", color="#c2561a", label="held out")
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    if axis.lines:
        axis.legend(frameon=False)
    return figure


def _parts_figure(steps: Sequence[Row]) -> Figure | None:
    """The training loss by bucket and by quarter of the times, side by side; None where neither is recorded."""
    plots: dict[str, dict[str, list[Row]]] = {}
    if buckets := list(dict.fromkeys(name for row in steps for name in row.get("by_bucket", ()))):
        plots["by shape"] = {
            name: [{"step": row["step"], "loss": row.get("by_bucket", {}).get(name)} for row in steps]
            for name in buckets
        }
    if quarters := [row for row in steps if row.get("by_quarter")]:
        count = len(quarters[-1]["by_quarter"])
        alike = [row for row in quarters if len(row["by_quarter"]) == count]
        plots["by quarter of the times, from data (0) to noise (1)"] = {
            f"{q / count:g} to {(q + 1) / count:g}": [
                {"step": row["step"], "loss": row["by_quarter"][q]} for row in alike
            ]
            for q in range(count)
        }
    if not plots:
        return None
    figure, axes = _figure(3.2, [*plots], len(plots))
    for axis, curves in zip(axes, plots.values(), strict=True):
        for name, rows in curves.items():
            x, y = _numbers(rows, "loss")
            axis.plot(x, _moving_mean(y, max(1, len(y) // 20)), ".-", markersize=3, label=name)
        axis.set_xlabel("step")
        if len(curves) <= MOST_NAMED:
            axis.legend(frameon=False, fontsize=7)
    return figure


def _terms_figure(steps: Sequence[Row]) -> Figure | None:
    """The named terms of the loss over the steps, each in its own plot; None where there is only one."""
    names = list(dict.fromkeys(name for row in steps for name in row.get("terms", ())))
    if not names:
        return None
    figure, axes = _figure(2.6 * -(-len(names) // 3), names)
    for axis, name in zip(axes, names, strict=True):
        axis.plot(*_numbers([{"step": row["step"], **row.get("terms", {})} for row in steps], name), color="#1f5fa8")
    return figure


def _validation_numbers(validations: Sequence[Row]) -> list[tuple[str, str]]:
    """The numbers of the last validation, its terms included; empty where it has the loss alone."""
    last = validations[-1] if validations else {}
    numbers = {**last, **last.get("terms", {})}
    known = ("step", "loss", "seconds")
    return [
        (name, f"{value:.6g}")
        for name, value in numbers.items()
        if isinstance(value, int | float) and name not in known
    ]


def _throughput_figure(steps: Sequence[Row]) -> Figure:
    shown = {"samples_per_s": 1.0, "data_wait": 100.0, "memory_bytes": 1e-9}
    figure, axes = _figure(2.6, ["samples/s", "data wait, %", "memory, GB"])
    for axis, (name, scale) in zip(axes, shown.items(), strict=True):
        x, y = _numbers(steps, name)
        axis.plot(x, [value * scale for value in y], color="#1f5fa8")
        axis.set_ylim(bottom=0)
    return figure


def _quantile_figure(validations: Sequence[Row]) -> Figure | None:
    if not validations or not validations[-1].get("by_quantile"):
        return None
    figure, (axis,) = _figure(3.6, [""], 1)
    count = len(validations[-1]["by_quantile"])
    for q in range(count):
        pairs = [
            (row["step"], row["by_quantile"][q]) for row in validations if len(row.get("by_quantile", ())) == count
        ]
        axis.plot([s for s, _ in pairs], [v for _, v in pairs], "o-", label=f"{q / count:.0%} to {(q + 1) / count:.0%}")
    axis.set_xlabel("step")
    axis.set_ylabel("held-out loss")
    axis.legend(frameon=False, title="part of the timesteps")
    return figure


def ranks_figure(steps: Sequence[Row]) -> Figure | None:
    """The seconds of a step by rank; None for a run of one process."""
    rows = [row for row in steps if row.get("ranks")]
    if not rows:
        return None
    names = [name for name in RANK_PARTS if name in rows[-1]["ranks"]]
    count = len(rows[-1]["ranks"]["compute"])
    alike = [row for row in rows if len(row["ranks"]["compute"]) == count]  # since the last change of their number
    figure, axes = _figure(3.0, [RANK_PARTS[name] for name in names], len(names))
    for axis, name in zip(axes, names, strict=True):
        for rank in range(count):
            line = [row["ranks"][name][rank] for row in alike]
            axis.plot([row["step"] for row in alike], line, ".-", markersize=3, label=f"rank {rank}")
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    if count <= MOST_NAMED:
        axes[0].legend(frameon=False, fontsize=7)
    return figure


def _attention_figure(steps: Sequence[Row]) -> Figure | None:
    """Each sparse layer's kept share, error, threshold, and planning time; None where no attention is sparse."""
    rows = [row for row in steps if row.get("attention")]
    if not rows:
        return None
    names = list(dict.fromkeys(layer["layer"] for row in rows for layer in row["attention"]))
    shown = {"kept": 100.0, "error": 100.0, "tau": 1.0, "plan_ms": 1.0}
    titles = ["pairs kept, %", "error of the output, %", "threshold x keys", "planning, ms a call"]
    figure, axes = _figure(5.2, titles, 2)
    for axis, (name, scale) in zip(axes, shown.items(), strict=True):
        for index, layer in enumerate(names):
            pairs = [
                (row["step"], layer_row[name] * scale)
                for row in rows
                for layer_row in row["attention"]
                if layer_row["layer"] == layer and layer_row[name] is not None
            ]
            color = (
                f"#{40 + 170 * index // max(1, len(names)):02x}{95:02x}{168 - 110 * index // max(1, len(names)):02x}"
            )
            axis.plot([step for step, _ in pairs], [value for _, value in pairs], color=color, label=layer)
        axis.set_ylim(bottom=0)
    if len(names) <= 8:
        axes[0].legend(frameon=False, fontsize=7)
    return figure


def _samples(folder: Path) -> list[tuple[int, list[tuple[str, str]]]]:
    """The newest steps with their videos and prompts. A step's folder holds NNN.mp4 and NNN.txt (the prompt)."""
    steps = sorted((p for p in folder.glob("step-" + "[0-9]" * 8) if p.is_dir()), reverse=True)
    shown = []
    for step in steps[:SHOWN_SAMPLES]:
        videos = []
        for video in sorted(step.glob("*.mp4")):
            prompt = video.with_suffix(".txt")
            caption = prompt.read_text(encoding="utf-8") if prompt.exists() else ""
            videos.append((data_uri(video.read_bytes(), "video/mp4"), caption))
        shown.append((int(step.name.removeprefix("step-")), videos))
    return shown
