"""`mmspeed bench decode`: the speed of the decoders that preprocess can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def decode(
    videos: Annotated[Path | None, typer.Option(help="Folder of your own videos; default: the demo clips.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Videos to decode, at most.")] = 16,
    size: Annotated[str, typer.Option(help="Height and width that frames are scaled to.")] = "96x160",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare the decoders that are installed, each in one process as preprocess uses it, and say which files each reads."""
    from mmspeed.bench.decode import bench_decode

    result = bench_decode(videos, count, size, rounds)
    print(result.to_json() if as_json else "\n".join(result.lines()))
