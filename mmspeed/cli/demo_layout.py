"""`mmspeed demo --task language --parallel LAYOUT`: the same steps on one process and on those of a layout, side by side."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mmspeed.config import RunConfig, make_config
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, format_seconds, get_logger, read_metrics
from mmspeed.plan.overlap import Part, exposed, nodes_of
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.simulate import picture, reckoned

from .demo import trained
from .demo_language import language_tree

log = get_logger("demo")

STEPS = 120
ROWS = 6  # of the table of losses
PAIRED = 4  # micro-batches for each process of a pipeline whose passes overlap
EXCHANGE = 0.5  # of what a part of a block computes
LEARNING_RATE = 3e-4  # at a higher one, a token that goes to another expert, since two scores are equal but for rounding, soon shows


def run_layout_demo(output: Path, short: bool, layout: str) -> list[Path] | None:
    """Train the demo's model of experts on one process and on those of a layout, and print losses, bytes and loads.

    Returns the folders of both runs; None where training was asked to stop. Raises UserError for a layout that does not fit, and where its
    processes fail.
    """
    from mmspeed.pipelines.check.layouts import require_fit, with_layout
    from mmspeed.pipelines.check.verdict import named, processes
    from mmspeed.pipelines.tasks import make_task
    from mmspeed.preprocess import TextCacheBuilder

    started, output = time.monotonic(), output.resolve()
    parallel = with_layout(make_config(_tree(output, short), origin="demo"), layout).parallel
    pipeline = Pipeline.of(parallel)
    paired = PAIRED * processes(parallel) // parallel.group if pipeline.overlaps else None
    alone = make_config(_tree(output, short, pipeline.stages, paired), origin="demo")
    spread = with_layout(alone, layout)
    if Pipeline.of(spread.parallel).ranks > 1:  # as many micro-batches as there are items
        spread = spread.model_copy(update={"train": spread.train.model_copy(update={"micro_batch_size": 1})})
    world = processes(spread.parallel)
    require_fit(spread, make_task(spread).domain)
    spread = spread.model_copy(update={"name": f"{alone.name}-{re.sub('[^a-z0-9]+', '-', named(spread.parallel))}"})
    log.info("1/3 preprocess: train a tokenizer and encode the texts once")
    for line in TextCacheBuilder(alone.texts, alone.tokenizer, alone.seed).run().lines():  # type: ignore[attr-defined]
        log.info(line)
    log.info(f"2/3 train: {alone.train.steps} steps on one process")
    if not trained(alone):
        return None
    log.info(f"3/3 train: the same steps on {world} processes, {named(spread.parallel)}")
    file = output / f"{spread.name}.yaml"
    file.write_text(yaml.safe_dump(spread.model_dump(mode="json", by_alias=True), sort_keys=False), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "mmspeed", "train", str(file), "--nproc", str(world)])
    if done.returncode:
        raise UserError(f"demo: training on {world} processes ended with code {done.returncode}; its line is above")
    rows = _rows(spread)
    for line in [*comparison(_rows(alone), rows, world), *pipeline_lines(spread, rows)]:
        log.info(line)
    log.info(f"done in {format_seconds(time.monotonic() - started)}; look at:")
    return [alone.run_dir, spread.run_dir, file]


def _tree(output: Path, short: bool, stages: int = 1, items: int | None = None) -> dict[str, Any]:
    """The demo's config for the comparison, unchecked: an auxiliary loss of each pack, which is the same on every layout.

    stages: the least number of blocks. items: of a step; None: the demo's.
    """
    tree = language_tree(output, short)
    if items is not None:
        tree["train"]["batch_size"] = items
    steps = tree["train"]["steps"] if short else STEPS
    tree["name"] = f"{tree['name']}-one"
    tree["model"].update(balance="sequence", num_hidden_layers=max(tree["model"]["num_hidden_layers"], stages))
    tree["train"].update(steps=steps, lr=LEARNING_RATE, log_every=max(1, steps // ROWS))
    tree["validate"]["every"] = tree["checkpoint"]["every"] = steps
    return tree


def _rows(config: RunConfig) -> list[dict[str, Any]]:
    return [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] in ("train", "validation")]


def pipeline_lines(config: RunConfig, rows: list[dict[str, Any]]) -> list[str]:
    """Lines on a pipeline: how long it stands still, and a picture of its step; none without one."""
    pipeline = Pipeline.of(config.parallel)
    steps = [row["pipeline"] for row in rows if "pipeline" in row]
    if pipeline.ranks == 1 or not steps:
        return []
    last = steps[-1]
    batches, waits = last["micro_batches"], last["waits"]
    each = ", ".join(f"{kind} {sum(of) / len(of):.3f}" for kind, of in waits.items())
    lines = [
        f"the pipeline: {batches} micro-batches through {pipeline.stages} stages; it stands still for {last['reckoned_bubble']:.0%} of a step, "
        "if stages are equal and backward takes twice as long as forward:",
        *picture(reckoned(pipeline, batches)),
        "digits: forward of a micro-batch, letters: backward, dots: waiting",
        f"measured in the last step, of {last['seconds']:.3f} s: it stands still for {last['bubble']:.0%}, and exposed exchanges add seconds: "
        f"{', '.join(f'{kind} {seconds:.3f}' for kind, seconds in last['exposed'].items())}; a process waits, in seconds ({each}); the report draws it",
    ]
    if pipeline.overlaps:
        lines.append(exposed_line(pipeline, batches, EXCHANGE))
    return lines


def exposed_line(pipeline: Pipeline, batches: int, exchange: float) -> str:
    """A line on the exchanges that a schedule with pairs hides, where each takes `exchange` times as long as attention, or as experts."""
    stages = [nodes_of([Part(1.0, 1.0, 1.0, exchange)] * 2)] * pipeline.stages  # a block's attention and experts
    shares = {
        schedule: exposed(replace(pipeline, schedule=schedule), batches, stages).share
        for schedule in ("interleaved", pipeline.schedule)
    }
    one, other = shares.values()
    return (
        f"with exchanges that take {exchange:g} of attention's or experts' forward pass each, {one:.1%} of a step are exposed in series, and "
        f"{other:.1%} with {pipeline.schedule}"
    )


def comparison(alone: list[dict[str, Any]], layout: list[dict[str, Any]], world: int) -> list[str]:
    """Lines on two runs, by their rows of metrics.jsonl: losses side by side, bytes between processes, the greatest loads."""
    lines = [f"{'':16}  {'one process':>12}  {f'{world} processes':>12}  {'relative':>8}"]
    for here, there in zip(alone, layout, strict=True):
        gap = abs(here["loss"] - there["loss"]) / abs(here["loss"])
        what = f"step {here['step']}" + (", held-out" if here["kind"] == "validation" else "")
        lines.append(f"{what:16}  {here['loss']:>12.6f}  {there['loss']:>12.6f}  {gap:>8.1e}")
    rows = [row for row in layout if row["kind"] == "train"]
    sent: dict[str, int] = {}
    for row in rows:
        for kind, count in row.get("sent_bytes", {}).items():
            sent[kind] = sent.get(kind, 0) + count
    steps = rows[-1]["step"]
    each = ", ".join(f"{kind} {format_bytes(count / steps)}" for kind, count in sorted(sent.items()))
    lines.append(f"a process sends in a step, beside parameters and gradients: {each or 'nothing'}")
    load = rows[-1].get("expert_load", {})
    if load:
        lines.append(f"the greatest load of an expert: {load['max']:.2f} of the mean ({load['worst']})")
    if "rank_load" in rows[-1]:
        over = rows[-1]["rank_load"]
        lines.append(
            f"the greatest load of a process: {over['max']:.2f} of the mean, {over['p50']:.2f} in half of the layers"
        )
    return lines
