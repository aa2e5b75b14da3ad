"""`mmspeed bench reliability`: the cost of what keeps a run alive."""

from __future__ import annotations

from typing import Annotated

import typer


def reliability(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the share of a step that the watchdog and the times of ranks take; exit with 1 when it is above their goals."""
    from mmspeed.bench.reliability.watch import bench_watch

    cost = bench_watch(rounds)
    print(cost.to_json() if as_json else "\n".join(cost.lines()))
    if not cost.passed():
        raise typer.Exit(1)
