"""The plot of `mmspeed bench attention --run`: error against kept fraction, layer by layer."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from .attention_suggest import LayerResult

ACROSS = 4
COLOURS = {"clusters": "#1f5fa8", "tiles": "#c2561a", "window": "#3d8a4e", "skip": "#7d5aa6"}


def plot(layers: Sequence[LayerResult]) -> bytes:
    """A PNG: a panel for each layer, a line for each planner; with the summary tail solid, without a tail dashed."""
    from matplotlib.figure import Figure

    across = min(ACROSS, len(layers))
    down = math.ceil(len(layers) / across)
    figure = Figure(figsize=(3.2 * across + 0.6, 2.6 * down + 0.8), layout="constrained")
    first = None
    for place, layer in enumerate(layers):
        axis = figure.add_subplot(down, across, place + 1, sharex=first, sharey=first)
        first = first or axis
        for planner, tail in dict.fromkeys(point.method for point in layer.points):
            points = [point for point in layer.points if point.method == (planner, tail)]
            line = sorted((sum(point.kept) / len(point.kept), point.error) for point in points)
            axis.plot(
                [kept for kept, _ in line],
                [error for _, error in line],
                "o-" if tail == "summary" else "o--",
                markersize=3,
                color=COLOURS.get(planner, "#666666"),
                label=f"{planner}, {tail}",
            )
        axis.set_yscale("log")
        axis.set_title(f"block {layer.block}, {layer.span}, {layer.tokens:,} tokens", fontsize=8)
        if place % across == 0:
            axis.set_ylabel("relative error")
        if place >= len(layers) - across:
            axis.set_xlabel("kept share of pairs")
    handles, labels = first.get_legend_handles_labels() if first is not None else ([], [])
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()
