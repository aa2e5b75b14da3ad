"""`mmspeed qualify`: check and measure the device of this machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mmspeed import log

from . import spoken


def qualify(
    device: Annotated[str, typer.Option(help="Kind of device; auto takes the fastest there is.")] = "auto",
    minutes: Annotated[
        float, typer.Option(help="Most minutes that it takes; checks that no longer fit are skipped by name.")
    ] = 8.0,
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Some of noise, kernels, rates, swap, steps; default all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not the table.")] = False,
) -> None:
    """Check every kernel of this device against its oracle, and measure rates, swaps and steps; exit with 1 where it falls short."""
    spoken.begin("qualify")
    with spoken.loading():
        from mmspeed.bench.qualify.run import qualify as run_qualify

    parts = [] if only is None else [word.strip() for word in only.split(",")]
    logger = log.get_logger("qualify")
    result = run_qualify(device, minutes, parts, logger.info)
    print(result.to_json() if as_json else "\n".join(result.lines()))
    if result.hung:  # its thread cannot be ended, and an orderly end would wait for the device
        sys.stdout.flush()
        os._exit(1)
    if not result.passed():
        raise typer.Exit(1)
