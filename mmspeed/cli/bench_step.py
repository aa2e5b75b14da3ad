"""`mmspeed bench step`: a training step's launches, bytes and waits, or its time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def step(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Count launches, bytes, waits and copies; no timing.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Count what the step of the largest micro-batch asks of device and host, or time it on this device."""
    import json

    from mmspeed.bench.step import StepCount, bench_step, median_line

    result = bench_step(config, overrides or (), count=count, rounds=rounds)
    if isinstance(result, StepCount):
        print(result.to_json() if as_json else "\n".join(result.lines()))
    else:
        print(json.dumps(result) if as_json else median_line(result))
