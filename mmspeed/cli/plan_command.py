"""`mmspeed plan`: a run on many devices, planned on one machine without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspeed import log
from mmspeed.errors import UserError

from . import completion, spoken


def plan(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", autocompletion=completion.config_files)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override, such as parallel.pp=4.")
    ] = None,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Simulate a step of the config's pipeline (parallel.pp).")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of the run; by default the fewest of its layout.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches", metavar="M", min=1, help="Micro-batches of a step; by default those of the config."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Also search for the fastest stages and schedule that fit so much of a device, such as 64GiB.",
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the step into this file.")] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="TFLOP/s of a device; by default 40% of the peak that the config names, or of an H100."
        ),
    ] = None,
    inner: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s between devices of a node; by default 200.")
    ] = None,
    outer: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="GB/s of a device to other nodes; by default parallel.balance.gigabytes_per_second."
        ),
    ] = None,
) -> None:
    """Simulate a step of a pipeline on the tables that run, from shapes: without its devices, weights or data."""
    from mmspeed.config import load_config
    from mmspeed.config.memory import parse_bytes

    if not pipeline:
        raise UserError("say what to plan: --pipeline simulates a step of a pipeline")
    run_config = load_config(config, overrides or ())
    try:
        limit = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise UserError(f"--memory: {error}") from None
    spoken.begin("plan", config, *(overrides or ()))
    with spoken.loading():
        from mmspeed.pipelines.report.pipeline_plan import Rates, plan_lines

    with log.Working("planning", tell=False):
        lines = plan_lines(run_config, Rates.of(run_config, tflops, inner, outer), devices, batches, limit, svg)
    print("\n".join(lines))
    spoken.then(f"check {config} --parallel pp=2,virtual={run_config.parallel.virtual}")
