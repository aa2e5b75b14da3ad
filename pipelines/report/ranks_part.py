"""The part of a run's report about its ranks: their seconds in a step, and those that were slow."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

PARTS = {
    "compute": "computing, s a step",
    "data": "waiting for data, s a step",
    "exchange": "waiting for exchanges, s a step",
}
NAMED_RANKS = 12  # of a run with more ranks, curves have no legend
SHOWN_ROWS = 20  # of slow ranks, the newest


def ranks_part(steps: Sequence[Row], show: Callable[[Any, str], str]) -> str:
    """The part of the page; empty for a run of one process. `show` makes a figure and its caption a piece of the page."""
    rows = [row for row in steps if row.get("ranks")]
    if not rows:
        return ""
    from matplotlib.figure import Figure

    names = [name for name in PARTS if name in rows[-1]["ranks"]]
    count = len(rows[-1]["ranks"]["compute"])
    alike = [row for row in rows if len(row["ranks"]["compute"]) == count]  # since the last change of their number
    figure = Figure(figsize=(9.5, 3.0), layout="constrained")
    for place, name in enumerate(names, 1):
        axis = figure.add_subplot(1, len(names), place)
        for rank in range(count):
            line = [row["ranks"][name][rank] for row in alike]
            axis.plot([row["step"] for row in alike], line, ".-", markersize=3, label=f"rank {rank}")
        axis.set_title(PARTS[name], fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        if place == 1 and count <= NAMED_RANKS:
            axis.legend(frameon=False, fontsize=7)
    caption = "Seconds of a step by rank; of more than 64 ranks the least, the median and the greatest."
    return f"<h2>Ranks</h2>{show(figure, caption)}{_table(rows)}"


def _table(rows: Sequence[Row]) -> str:
    slow = [(row["step"], one) for row in rows for one in row.get("slow_ranks", ())]
    if not slow:
        return "<p>No rank was slow.</p>"
    lines = "".join(
        f"<tr><td>{step}</td><td>{one['rank']}</td><td>{html.escape(one['host'])}</td><td>{one['factor']:.2f} x</td></tr>"
        for step, one in slow[-SHOWN_ROWS:]
    )
    return (
        f"<p>{len(slow)} times a rank was slow; the newest:</p><table class='ranks'><tr><th>step</th><th>rank</th><th>host</th>"
        f"<th>its computing against the others' median</th></tr>{lines}</table>"
    )
