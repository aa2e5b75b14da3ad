"""`mmspeed report RUN`: one self-contained HTML page with loss curves, throughput, samples and the config."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.config import Config, RunConfig, dump_config
from mmspeed.log import format_bytes, format_seconds, read_metrics
from mmspeed.loop.checkpoint.load import recorded
from mmspeed.models.build import words_of
from mmspeed.page_policy import PAGE_POLICY
from mmspeed.pipelines.report import memory_page
from mmspeed.pipelines.report.ranks_part import ranks_part
from mmspeed.pipelines.run.run_folder import RunFolder, write_text
from mmspeed.redaction import redacted
from mmspeed.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 12  # curves of a plot that have a legend
SHOWN_SAMPLES = 6  # newest steps whose videos are on the page

STYLE = """
:root{color-scheme:light dark;--text:#1c2733;--soft:#566575;--line:#d5dde5;--page:#fbfcfd;--card:#fff}
@media (prefers-color-scheme:dark){:root{--text:#e3e9ef;--soft:#9fb0c0;--line:#34414e;--page:#12181e;--card:#1a222a}
.plot img{filter:invert(.9) hue-rotate(180deg)}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:var(--text);background:var(--page);
overflow-wrap:anywhere}
h1{font-size:1.6em;margin-bottom:.1em} h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid var(--line);padding-bottom:.2em}
.sub{color:var(--soft)} table{border-collapse:collapse} td,th{padding:.25em .9em .25em 0;text-align:left;vertical-align:top}
td,th{overflow-wrap:break-word} .ranks td:nth-child(3){overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.8em}
.tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.6em 1em}
.tile b{display:block;font-size:1.25em} img,video{max-width:100%;border-radius:4px} figure{margin:0 0 1.4em} figcaption{color:var(--soft)}
.plot div{overflow-x:auto} .plot img{min-width:640px}
.videos{display:flex;flex-wrap:wrap;gap:1em} .videos figure{width:min(320px,100%)} .videos video{width:100%}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:1em;overflow:auto;overflow-wrap:normal;font-size:13px}
"""


def write_report(run: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    The page needs no network and no other file. Raises UserError when `run` is not a run.
    """
    folder = RunFolder.open(run)
    config = folder.run_config()
    rows = read_metrics(folder.metrics)
    steps = [row for row in rows if row.get("kind") == "train"]
    validations = [row for row in rows if row.get("kind") == "validation"]
    reached = max((entry["step"] for entry in (*rows, *recorded(folder.checkpoints)) if "step" in entry), default=0)
    parts = [
        f"<h1>{html.escape(config.name)}</h1>",
        f'<p class="sub">mmspeed {__version__} &middot; {html.escape(_description(config))}</p>',
        _tiles(steps, validations, reached),
        "<h2>Loss</h2>",
        _figure(
            _png(_loss_figure(steps, validations)),
            "Training loss as means of the steps between two rows (dots), their moving mean, and the held-out loss.",
        ),
        _parts_part(steps),
        _terms_part(steps),
        _validation_part(validations),
        _quantile_part(validations),
        "<h2>Throughput</h2>",
        _figure(
            _throughput_plot(steps), "Samples per second, share of the time spent waiting for data, and memory in use."
        ),
        ranks_part(steps, lambda figure, caption: _figure(_png(figure), caption)),
        memory_page.page_part(folder.root, lambda figure, caption: _figure(_png(figure), caption)),
        _attention_part(steps),
        _samples(folder.samples, asked=isinstance(config, Config)),
        "<h2>Config</h2>",
        f"<pre>{html.escape(redacted(dump_config(config)))}</pre>",
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        + PAGE_POLICY
        + '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(config.name)} - mmspeed</title><style>{STYLE}</style></head><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )
    write_text(folder.report, page)
    return folder.report


def _description(config: RunConfig) -> str:
    """A short description of the model and its objective, or of the task."""
    if isinstance(config, Config):
        return f"model {words_of(config.model)} \u00b7 objective {config.objective.kind}"
    return f"task {config.task}"


def _numbers(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _tiles(steps: list[dict[str, Any]], validations: list[dict[str, Any]], reached: int) -> str:
    if not steps:
        return "<p>No step has been logged yet.</p>"
    last = steps[-1]
    tail = steps[-max(1, len(steps) // 10) :]
    # a row is a mean of `steps` steps; those of earlier versions are single steps
    losses = [(row["loss"], row.get("steps", 1)) for row in tail if row.get("loss") is not None]
    counted = sum(count for _, count in losses)
    mean = f"{sum(loss * count for loss, count in losses) / counted:.4f}" if counted else "not finite"
    tiles = [
        ("step", str(reached)),
        ("loss (mean of the last tenth)", mean),
        ("held-out loss", f"{validations[-1]['loss']:.4f}" if validations and validations[-1].get("loss") else "none"),
        ("samples/s", f"{last['samples_per_s']:.2f}"),
        ("tokens/s", f"{last['tokens_per_s']:.0f}"),
        ("MFU", f"{last['mfu']:.1%}" if last.get("mfu") is not None else "unknown"),
        ("waiting for data", f"{last['data_wait']:.1%}"),
        ("peak memory", format_bytes(last["peak_memory_bytes"])),
        ("training time", format_seconds(last.get("elapsed_seconds", 0.0))),
    ]
    counts = {"skipped_steps": "skipped steps", "left_out_samples": "samples left out", "roll_backs": "roll-backs"}
    tiles += [(name, str(last[key])) for key, name in counts.items() if last.get(key)]
    note = f'<p class="sub">MFU is measured against {last["peak_tflops"]:.2f} TFLOP/s: {html.escape(last["peak_source"])}.</p>'
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{v}</b>{k}</div>' for k, v in tiles) + "</div>" + note


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


def _loss_figure(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> Figure:
    figure: Figure
    figure, axis = _axes()
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


def _parts_part(steps: list[dict[str, Any]]) -> str:
    """The training loss by bucket and by quarter of the times, side by side; empty where neither is recorded."""
    buckets = list(dict.fromkeys(name for row in steps for name in row.get("by_bucket", ())))
    quarters = [row for row in steps if row.get("by_quarter")]
    plots: list[tuple[str, list[tuple[str, list[dict[str, object]]]]]] = []
    if buckets:
        curves = [
            (name, [{"step": row["step"], "loss": row.get("by_bucket", {}).get(name)} for row in steps])
            for name in buckets
        ]
        plots.append(("by shape", curves))
    if quarters:
        count = len(quarters[-1]["by_quarter"])
        alike = [row for row in quarters if len(row["by_quarter"]) == count]
        curves = [
            (
                f"{q / count:g} to {(q + 1) / count:g}",
                [{"step": row["step"], "loss": row["by_quarter"][q]} for row in alike],
            )
            for q in range(count)
        ]
        plots.append(("by quarter of the times, from data (0) to noise (1)", curves))
    if not plots:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    for place, (title, named_rows) in enumerate(plots, 1):
        axis = figure.add_subplot(1, len(plots), place)
        for name, rows in named_rows:
            x, y = _numbers(rows, "loss")
            axis.plot(x, _moving_mean(y, max(1, len(y) // 20)), ".-", markersize=3, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        if len(named_rows) <= MOST_NAMED:
            axis.legend(frameon=False, fontsize=7)
    return _figure(_png(figure), f"Training loss {' and '.join(title for title, _ in plots)}: moving means.")


def _terms_part(steps: list[dict[str, Any]]) -> str:
    """The named terms of the loss over the steps, each in its own plot; empty where there is only one."""
    names = list(dict.fromkeys(name for row in steps for name in row.get("terms", ())))
    if not names:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 2.6 * -(-len(names) // 3)), layout="constrained")
    for place, name in enumerate(names, 1):
        axis = figure.add_subplot(-(-len(names) // 3), 3, place)
        axis.plot(*_numbers([{"step": row["step"], **row.get("terms", {})} for row in steps], name), color="#1f5fa8")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.25)
    return _figure(_png(figure), "The terms of the loss, and those that are logged alone, each over its divisor.")


def _validation_part(validations: list[dict[str, Any]]) -> str:
    """The numbers of the last validation as a table, its terms included; empty where it has the loss alone."""
    last = validations[-1] if validations else {}
    known = ("step", "loss", "seconds")
    numbers = {**last, **last.get("terms", {})}
    more = {name: value for name, value in numbers.items() if isinstance(value, int | float) and name not in known}
    if not more:
        return ""
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:.6g}</td></tr>" for name, value in more.items())
    return f"<h2>Validation</h2><p class='sub'>At step {last['step']}.</p><table>{cells}</table>"


def _throughput_plot(steps: list[dict[str, Any]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 2.6), layout="constrained")
    for place, (name, label, scale) in enumerate(
        (
            ("samples_per_s", "samples/s", 1.0),
            ("data_wait", "data wait, %", 100.0),
            ("memory_bytes", "memory, GB", 1e-9),
        ),
        1,
    ):
        axis = figure.add_subplot(1, 3, place)
        x, y = _numbers(steps, name)
        axis.plot(x, [value * scale for value in y], color="#1f5fa8")
        axis.set_title(label, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    return _png(figure)


def _quantile_part(validations: list[dict[str, Any]]) -> str:
    if not validations or not validations[-1].get("by_quantile"):
        return ""
    figure, axis = _axes()
    count = len(validations[-1]["by_quantile"])
    for q in range(count):
        pairs = [
            (row["step"], row["by_quantile"][q]) for row in validations if len(row.get("by_quantile", ())) == count
        ]
        axis.plot([s for s, _ in pairs], [v for _, v in pairs], "o-", label=f"{q / count:.0%} to {(q + 1) / count:.0%}")
    axis.set_xlabel("step")
    axis.set_ylabel("held-out loss")
    axis.legend(frameon=False, title="part of the timesteps")
    return _figure(
        _png(figure),
        "Held-out loss by part of the timestep distribution: the first is near the data, the last near noise.",
    )


def _attention_part(steps: list[dict[str, Any]]) -> str:
    """Plots of each sparse layer's kept share, error, threshold, and planning time."""
    rows = [row for row in steps if row.get("attention")]
    if not rows:
        return ""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(layer["layer"] for row in rows for layer in row["attention"]))
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    shown = (
        ("kept", "pairs kept, %", 100.0),
        ("error", "error of the output, %", 100.0),
        ("tau", "threshold x keys", 1.0),
        ("plan_ms", "planning, ms a call", 1.0),
    )
    for place, (name, label, scale) in enumerate(shown, 1):
        axis = figure.add_subplot(2, 2, place)
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
        axis.set_title(label, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        if place == 1 and len(names) <= 8:
            axis.legend(frameon=False, fontsize=7)
    caption = "Sparse attention by layer: shares of pairs, error against dense attention on sampled queries, threshold, planning."
    return "<h2>Sparse attention</h2>" + _figure(_png(figure), caption)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    axis = figure.add_subplot()
    axis.grid(alpha=0.25)
    return figure, axis


def _png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return _data_uri(buffer.getvalue(), "image/png")


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _figure(source: str, caption: str) -> str:
    text = html.escape(caption)
    return f'<figure class="plot"><div><img src="{source}" alt="{text}"></div><figcaption>{text}</figcaption></figure>'


def _samples(folder: Path, asked: bool) -> str:
    """The newest steps' videos with their prompts. A step's folder holds NNN.mp4 and NNN.txt (the prompt).

    asked: True for a task that makes videos, so that the page says so where there are none.
    """
    steps = (
        sorted((p for p in folder.glob("step-" + "[0-9]" * 8) if p.is_dir()), reverse=True) if folder.is_dir() else []
    )
    if not steps:
        none = "<h2>Samples</h2><p>No videos were sampled during this run (set validate.prompts).</p>"
        return none if asked else ""
    parts = ["<h2>Samples</h2>"]
    for step in steps[:SHOWN_SAMPLES]:
        parts.append(f"<h3>step {int(step.name.removeprefix('step-'))}</h3><div class='videos'>")
        for video in sorted(step.glob("*.mp4")):
            prompt = video.with_suffix(".txt")
            caption = html.escape(prompt.read_text(encoding="utf-8")) if prompt.exists() else ""
            uri = _data_uri(video.read_bytes(), "video/mp4")
            parts.append(
                f'<figure><video src="{uri}" controls loop muted autoplay></video><figcaption>{caption}</figcaption></figure>'
            )
        parts.append("</div>")
    return "".join(parts)
