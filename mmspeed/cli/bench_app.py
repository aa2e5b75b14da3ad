"""`mmspeed bench`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure that the main job works, and how well.", no_args_is_help=True)


@app.command()
def overfit(
    output: Annotated[Path, typer.Option(help="Folder that the measurement writes to.")] = Path("runs/overfit"),
    arrangement: Annotated[str, typer.Option(help="factorised or full.")] = "factorised",
    objective: Annotated[str, typer.Option(help="flow or ddpm.")] = "flow",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")] = None,
) -> None:
    """Train a tiny model on four demo clips and see whether each caption brings its own back; exit with 1 if not."""
    from .bench import overfit as run_overfit

    result = run_overfit(output, arrangement, objective, tuple(overrides or ()))
    print("\n".join(result.lines()))
    if not result.passed():
        raise typer.Exit(1)
