"""`mmspeed report RUN`: one self-contained HTML page with loss curves, throughput, samples and the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mmspeed.config import Config, RunConfig, dump_config
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, format_seconds, read_metrics
from mmspeed.models.sections import words_of
from mmspeed.pages import data_uri, figure_uri, render
from mmspeed.pipelines.report.advice import advised, first_checkpoint
from mmspeed.pipelines.report.memory_page import read_report, report_figure
from mmspeed.pipelines.run.run_folder import RunFolder, write_text
from mmspeed.plan.measured_pipeline import spans_of
from mmspeed.plan.pipeline_picture import pipeline_svg
from mmspeed.redaction import redacted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 12  # curves of a plot that have a legend
SHOWN_SAMPLES = 6  # newest steps whose videos are on the page
RISEN = 1.02  # held-out loss over the lowest from which the page says that it rises
WIDE, NARROW = (
    (4.8, 3.2),
    (3.2, 2.5),
)  # inches of a plot, of which two or three stand side by side, and one in a window of a phone
RANK_PARTS = {
    "compute": "computing, s a step",
    "data": "waiting for data, s a step",
    "exchange": "waiting for exchanges, s a step",
    "experts": "waiting at experts, s a step",
    "attention": "waiting at attention, s a step",
    "end": "waiting at the end, s a step",
}
LOADS = {"expert_load": "expert", "rank_load": "device"}  # of which a layer has a greatest load
OVER_LAYERS = {"p50": 50, "p95": 95, "max": 100}
Row = Mapping[str, Any]


def write_report(run: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    The page needs no network and no other file. Raises UserError when `run` is not a run.
    """
    folder = RunFolder.open(run)
    config = folder.run_config()
    rows = read_metrics(folder.metrics)
    steps, validations = ([row for row in rows if row.get("kind") == kind] for kind in ("train", "validation"))
    saved = folder.steps()
    reached = max((*saved, *(row["step"] for row in rows if "step" in row)), default=0)
    memory = read_report(folder.root)
    data = folder.root.absolute().parent / f"{config.name}-data.html"  # of `check`
    figures = {
        "loss": _loss_figures(steps, validations),
        "parts": _parts_figures(steps),
        "terms": _terms_figures(steps),
        "quantiles": _quantile_figures(validations),
        "throughput": _throughput_figures(steps),
        "ranks": ranks_figures(steps),
        "experts": experts_figures(steps),
        "memory": [] if memory is None else [report_figure(memory)],
        "attention": _attention_figures(steps),
    }
    plots = {name: [figure_uri(one) for one in several] for name, several in figures.items()}
    staged = next((row for row in reversed(steps) if "bubble" in row.get("pipeline", ())), None)
    page = render(
        "run.html",
        title=f"{config.name} - mmspeed",
        name=config.name,
        description=_description(config),
        tiles=_tiles(steps, validations, reached),
        last=steps[-1] if steps else {},
        validation=_validation_numbers(validations),
        validated=validations[-1]["step"] if validations else 0,
        rise=_rise(validations, saved),
        plots=plots | {"pipeline": [] if staged is None else pipeline_pictures(folder)},
        pipeline_step=staged,
        pipeline=[] if staged is None else _pipeline_rows(staged["pipeline"]),
        parts=[one.axes[0].get_title() for one in figures["parts"]],
        slow=[
            (row["step"], one["rank"], one["host"], f"{one['factor']:.2f} x")
            for row in steps
            for one in row.get("slow_ranks", ())
        ],
        loads=_last_loads(steps),
        over_layers=list(OVER_LAYERS),
        memory=[] if memory is None else memory.lines(),
        samples=_samples(folder.samples),
        makes_videos=isinstance(config, Config),
        commands=advised(folder.root, config),
        unsaved=None if saved else first_checkpoint(folder.root, config),
        data_page=quote(data.name) if data.exists() else None,
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
    last, seconds = steps[-1], _seconds(steps)
    tail = steps[-max(1, len(steps) // 10) :]
    losses = [(row["loss"], row["steps"]) for row in tail if row.get("loss") is not None]
    counted = sum(count for _, count in losses)
    mean = f"{sum(loss * count for loss, count in losses) / counted:.4f}" if counted else "not finite"
    counts = {"skipped_steps": "skipped steps", "left_out_samples": "samples left out", "roll_backs": "roll-backs"}
    return [
        ("step", str(reached)),
        ("loss (mean of the last tenth)", mean),
        ("held-out loss", f"{validations[-1]['loss']:.4f}" if validations and validations[-1].get("loss") else "none"),
        ("samples/s", _mean(steps, seconds, "samples_per_s", ".2f")),
        ("tokens/s", _mean(steps, seconds, "tokens_per_s", ".0f")),
        ("MFU", _mean(steps, seconds, "mfu", ".1%")),
        ("waiting for data", _mean(steps, seconds, "data_wait", ".1%")),
        ("peak memory", format_bytes(max(row["peak_memory_bytes"] for row in steps))),
        ("training time", format_seconds(sum(seconds))),
        *((name, str(last[key])) for key, name in counts.items() if last.get(key)),
    ]


def _seconds(steps: Sequence[Row]) -> list[float]:
    """The training time of each row, whichever session wrote it: `elapsed_seconds` begins anew in each."""
    before = [0, *(row["step"] for row in steps)]
    return [
        sum(row["step_seconds"].values()) * (row["step"] - first) for row, first in zip(steps, before, strict=False)
    ]


def _mean(steps: Sequence[Row], seconds: Sequence[float], name: str, form: str) -> str:
    """The mean of a rate over the training time."""
    known = [(row[name], time) for row, time in zip(steps, seconds, strict=True) if row.get(name) is not None]
    total = sum(time for _, time in known)
    return format(sum(value * time for value, time in known) / total, form) if total else "unknown"


def _rise(validations: Sequence[Row], saved: Sequence[int]) -> str | None:
    """A sentence for a run whose held-out loss was lower before; `saved`: the steps of its checkpoints."""
    losses = [(row["loss"], row["step"]) for row in validations if row.get("loss")]
    if not losses:
        return None
    (lowest, best), (last, now) = min(losses), losses[-1]
    if last <= RISEN * lowest:
        return None
    advice = f"sample it with --checkpoint {best}" if best in saved else "checkpoint.keep_best keeps such a step"
    return (
        f"The held-out loss was lowest at step {best} ({lowest:.4f}) and is {last:.4f} at step {now}: "
        f"the model learns its samples by heart. More samples or fewer steps help; {advice}."
    )


def _moving_mean(values: list[float], window: int) -> list[float]:
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


def save_loss_curve(run: str | Path, path: Path) -> None:
    """Write the losses of a run, over training and held out, as a PNG. Raises UserError when `run` is not a run."""
    rows = read_metrics(RunFolder.open(run).metrics)
    (figure,) = _loss_figures(*([row for row in rows if row.get("kind") == kind] for kind in ("train", "validation")))
    figure.savefig(path, dpi=110)


def _figures(titles: Sequence[str], size: tuple[float, float]) -> tuple[list[Figure], list[Any]]:
    """Figures of one plot each, which stand side by side or below one another, and their axes."""
    from matplotlib.figure import Figure

    figures = [Figure(figsize=size, layout="constrained") for _ in titles]
    axes = [figure.add_subplot(title=title) for figure, title in zip(figures, titles, strict=True)]
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
    return figures, axes


def _loss_figures(steps: Sequence[Row], validations: Sequence[Row]) -> list[Figure]:
    figures, (axis,) = _figures([""], WIDE)
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
    return figures


def _parts_figures(steps: Sequence[Row]) -> list[Figure]:
    """The training loss by bucket and by quarter of the times, none where neither is recorded."""
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
        return []
    figures, axes = _figures([*plots], WIDE)
    for axis, curves in zip(axes, plots.values(), strict=True):
        for name, rows in curves.items():
            x, y = _numbers(rows, "loss")
            axis.plot(x, _moving_mean(y, max(1, len(y) // 20)), ".-", markersize=3, label=name)
        axis.set_xlabel("step")
        if len(curves) <= MOST_NAMED:
            axis.legend(frameon=False, fontsize=9)
    return figures


def _terms_figures(steps: Sequence[Row]) -> list[Figure]:
    """The named terms of the loss over the steps, each in its own plot; none where there is only one."""
    names = list(dict.fromkeys(name for row in steps for name in row.get("terms", ())))
    if not names:
        return []
    figures, axes = _figures(names, NARROW)
    for axis, name in zip(axes, names, strict=True):
        axis.plot(*_numbers([{"step": row["step"], **row.get("terms", {})} for row in steps], name), color="#1f5fa8")
    return figures


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


def _throughput_figures(steps: Sequence[Row]) -> list[Figure]:
    shown = {"samples_per_s": 1.0, "data_wait": 100.0, "memory_bytes": 1e-9}
    figures, axes = _figures(["samples/s", "data wait, %", "memory, GB"], NARROW)
    for axis, (name, scale) in zip(axes, shown.items(), strict=True):
        x, y = _numbers(steps, name)
        axis.plot(x, [value * scale for value in y], color="#1f5fa8")
        axis.set_ylim(bottom=0)
    return figures


def _quantile_figures(validations: Sequence[Row]) -> list[Figure]:
    if not validations or not validations[-1].get("by_quantile"):
        return []
    figures, (axis,) = _figures([""], WIDE)
    count = len(validations[-1]["by_quantile"])
    for q in range(count):
        pairs = [
            (row["step"], row["by_quantile"][q]) for row in validations if len(row.get("by_quantile", ())) == count
        ]
        axis.plot([s for s, _ in pairs], [v for _, v in pairs], "o-", label=f"{q / count:.0%} to {(q + 1) / count:.0%}")
    axis.set_xlabel("step")
    axis.set_ylabel("held-out loss")
    axis.legend(frameon=False, title="part of the timesteps")
    return figures


def ranks_figures(steps: Sequence[Row]) -> list[Figure]:
    """The seconds of a step by rank; none for a run of one process."""
    rows = [row for row in steps if row.get("ranks")]
    if not rows:
        return []
    count = len(rows[-1]["ranks"]["compute"])
    alike = [row for row in rows if len(row["ranks"]["compute"]) == count]  # since the last change of their number
    columns = [{**row["ranks"], **row.get("waits", {})} for row in alike]
    names = [name for name in RANK_PARTS if any(name in parts for parts in columns)]
    figures, axes = _figures([RANK_PARTS[name] for name in names], NARROW)
    for axis, name in zip(axes, names, strict=True):
        for rank in range(count):
            line = [parts[name][rank] if name in parts else 0.0 for parts in columns]
            axis.plot([row["step"] for row in alike], line, ".-", markersize=3, label=f"rank {rank}")
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    if count <= MOST_NAMED:
        axes[0].legend(frameon=False, fontsize=7)
    return figures


def _load_rows(steps: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows with loads of experts, and those with loads of devices."""
    rows = {key: [row for row in steps if row.get(key)] for key in LOADS}
    return {key: of for key, of in rows.items() if of}


def _over_layers(load: Mapping[str, Any]) -> list[float]:
    import numpy as np

    return [float(value) for value in np.percentile(load["by_layer"], [*OVER_LAYERS.values()])]


def experts_figures(steps: Sequence[Row]) -> list[Figure]:
    """The greatest loads of experts and of devices, over the mean of their layer: over the steps, and by layer; none without experts."""
    rows = _load_rows(steps)
    if not rows:
        return []
    titles = [f"load of the hottest {LOADS[key]}, x mean" for key in rows]
    figures, (*curves, layers) = _figures([*titles, "by layer, at the last step"], NARROW)
    for axis, (key, of) in zip(curves, rows.items(), strict=True):
        lines = zip(*(_over_layers(row[key]) for row in of), strict=True)
        for name, line in zip(OVER_LAYERS, lines, strict=True):
            axis.plot([row["step"] for row in of], line, ".-", markersize=3, label=name)
        axis.set_xlabel("step")
        last = of[-1][key]["by_layer"]
        layers.plot(range(1, len(last) + 1), last, ".-", markersize=5, label=LOADS[key])
    layers.set_xlabel("layer with experts")
    layers.xaxis.get_major_locator().set_params(integer=True)
    for axis in (*curves, layers):
        axis.legend(frameon=False, fontsize=7)
    return figures


def _last_loads(steps: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines of a table: the greatest load of an expert, and of a device, over layers, and the layer with the worst."""
    lasts = [(LOADS[key], of[-1]["step"], of[-1][key]) for key, of in _load_rows(steps).items()]
    return [
        (f"hottest {name}, step {step}", *(f"{value:.2f}" for value in _over_layers(load)), load["worst"])
        for name, step, load in lasts
    ]


def pipeline_pictures(folder: RunFolder) -> list[str]:
    """The picture of the last logged step of a pipeline, as a data URI; none where none was measured. Raises UserError for a damaged file."""
    if not folder.pipeline.exists():
        return []
    try:
        spans = spans_of(folder.pipeline.read_text(encoding="utf-8"))
        return [data_uri(pipeline_svg(spans).encode(), "image/svg+xml")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{folder.pipeline} cannot be read ({error}); remove it, or train on to write it") from None


def _pipeline_rows(found: Row) -> list[tuple[str, ...]]:
    """Lines of a table: what each process of a pipeline did in a step, in seconds."""
    columns = (found["compute"], *found["waits"].values())
    return [(f"rank {rank}", *(f"{of[rank]:.4g}" for of in columns)) for rank in range(len(found["compute"]))]


def _attention_figures(steps: Sequence[Row]) -> list[Figure]:
    """Each sparse layer's kept share, error, threshold, and planning time; none where no attention is sparse."""
    rows = [row for row in steps if row.get("attention")]
    if not rows:
        return []
    names = list(dict.fromkeys(layer["layer"] for row in rows for layer in row["attention"]))
    shown = {"kept": 100.0, "error": 100.0, "tau": 1.0, "plan_ms": 1.0}
    titles = ["pairs kept, %", "error of the output, %", "threshold x keys", "planning, ms a call"]
    figures, axes = _figures(titles, WIDE)
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
        axes[0].legend(frameon=False, fontsize=9)
    return figures


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
