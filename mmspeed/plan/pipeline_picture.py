"""Draw a step of a pipeline, simulated or measured, as SVG: a row for each rank, a bar for each pass, and nothing where a rank waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmspeed.pages import render

from .schedules import Action, Pair

Span = tuple[Action | Pair, float, float]  # an entry of a table, when it begins and when it ends

KINDS = {"forward": "#3b74b8", "backward": "#d9812e", "input": "#d9812e", "weight": "#3d8f7a"}
NAMES = {"input": "gradient of the input", "weight": "gradients of weights"}
WIDTH, ROW, GAP, LEFT, TOP = (
    1000.0,
    28.0,
    6.0,
    60.0,
    30.0,
)  # of the bars; of a row and between rows; beside and above them
TICK = 250.0  # from one time to the next
PALEST = 0.65  # opacity of a rank's last stage; its first one is opaque


def seconds_shown(seconds: float) -> str:
    """`1.25 s`, `830 ms`, `42.1 us`."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e6, "us") if 0 < seconds < 1e-3 else (1e3, "ms")
    return f"{seconds * scale:.3g} {unit}"


def pipeline_svg(
    spans: Sequence[Sequence[Span]], shown: Callable[[float], str] = seconds_shown, width: float = WIDTH
) -> str:
    """The SVG of a step's spans, by rank, as of `simulate(...).spans`. `shown`: a time as it is written. width: of all bars together.

    A bar has the number of its micro-batch, in a colour for its kind, paler for the later stages of a rank. Of two passes that overlap the
    forward one is above.
    """
    step = max((end for row in spans for _, _, end in row), default=0.0) or 1.0
    parts = [part for row in spans for entry, _, _ in row for part in entry.parts]
    bars = [bar for rank, row in enumerate(spans) for bar in _bars(rank, row, width / step, shown)]
    times = round(width / TICK)
    return render(
        "pipeline.svg",
        bars=bars,
        rows=[(f"rank {rank}", TOP + rank * (ROW + GAP)) for rank in range(len(spans))],
        legend=[(NAMES.get(kind, kind), color) for kind, color in KINDS.items() if any(p.kind == kind for p in parts)],
        times=[(LEFT + width * at / times, shown(step * at / times)) for at in range(times + 1)],
        left=LEFT,
        width=width,
        height=ROW,
        bottom=TOP + len(spans) * (ROW + GAP),
    )


def _bars(rank: int, row: Sequence[Span], scale: float, shown: Callable[[float], str]) -> list[dict[str, object]]:
    stages = sorted({part.stage for entry, _, _ in row for part in entry.parts})
    bars = []
    for entry, begin, end in row:
        height, width = ROW / len(entry.parts), (end - begin) * scale
        for place, part in enumerate(entry.parts):
            paler = (1 - PALEST) * stages.index(part.stage) / max(1, len(stages) - 1)
            label = str(part.batch)
            bars.append(
                {
                    "x": round(LEFT + begin * scale, 2),
                    "y": round(TOP + rank * (ROW + GAP) + place * height, 2),
                    "width": round(width, 2),
                    "height": height,
                    "color": KINDS[part.kind],
                    "opacity": round(1 - paler, 2),
                    "label": label,
                    "size": round(min(13.0, 1.5 * width / len(label), 0.85 * height), 1),
                    "words": f"{NAMES.get(part.kind, part.kind)}, micro-batch {part.batch}, stage {part.stage}: "
                    f"{shown(begin)} to {shown(end)}",
                }
            )
    return bars
