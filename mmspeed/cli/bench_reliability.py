"""`mmspeed bench reliability`: the cost of what keeps a run alive."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def reliability(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    megabytes: Annotated[int, typer.Option("--state-mb", min=4, help="Size of the state that is saved.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the watchdog's, the ranks' times' and re-verification's share of a step, and the cost of saving; exit with 1 above a goal."""
    from mmspeed.bench.reliability.reading import bench_reading
    from mmspeed.bench.reliability.saving import bench_saving
    from mmspeed.bench.reliability.watch import bench_watch

    watch, saving, reading = bench_watch(rounds), bench_saving(rounds, megabytes), bench_reading(rounds)
    if as_json:
        parts = {"saving": json.loads(saving.to_json()), "reading": json.loads(reading.to_json())}
        print(json.dumps({**json.loads(watch.to_json()), **parts}, indent=2))
    else:
        print("\n".join([*watch.lines(), *saving.lines(), *reading.lines()]))
    if not (watch.passed() and saving.passed() and reading.passed()):
        raise typer.Exit(1)
