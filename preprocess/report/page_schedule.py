"""Render the schedule on a data set's page: the tables of the text lines, and an epoch as a plot. Pure functions, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.preprocess.report.charts import card, cell, table, text
from mmspeed.preprocess.report.schedule_preview import Curve, SchedulePreview, StagePreview
from mmspeed.preprocess.report.schedule_text import TextTable, stage_sentence, stage_tables, stage_title, training_table

Array = npt.NDArray[Any]
_COLOURS = ("#2aa3b5", "#8f62c0", "#6b9e2f", "#c85a8a", "#a8962c", "#5560c0", "#8c6d46")  # on light and on dark
_OTHERS = "#8a949e"
_WIDTH, _LEFT, _RIGHT = 600, 76, 8  # of the plot, in its own pixels
_PANELS = {"cost": (8, 118), "imbalance": (150, 190), "buckets": (222, 246)}  # top and bottom
_HEIGHT = 266
_LEAST_SCALE = 0.05  # of the panel of imbalance, above 1


def schedule_section(outlook: SchedulePreview | None) -> str:
    """The section of the page; empty without an outlook."""
    if outlook is None:
        return ""
    parts = ["<h2>Schedule</h2>"]
    for stage in outlook.stages:
        if title := stage_title(outlook, stage):
            parts.append(f'<h3 style="margin-top:1.6em">{text(_sentence(title))}</h3>')
        parts.append(f"<p>{text(_sentence(stage_sentence(stage)))}.</p>")
        parts += [_table(one, first=1 if number else 0) for number, one in enumerate(stage_tables(outlook, stage))]
        parts.append(f'<div style="margin-top:1em">{_plot(outlook, stage)}</div>')
    return "".join(parts) + _table(training_table(outlook), first=0)


def _table(one: TextTable, first: int) -> str:
    """A table; its columns from `first` on hold numbers."""
    rows = [
        [cell(text(word), place >= first, f"{one.key}-{number}-{place}") for place, word in enumerate(row)]
        for number, row in enumerate(one.rows)
    ]
    caption = f'<p class="sub">{text(_sentence(one.title))}</p>'
    note = f'<p class="sub">{text(_sentence(one.note))}.</p>' if one.note else ""
    return caption + table(one.head, rows, range(first, len(one.head)), stack=True) + note


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _plot(outlook: SchedulePreview, stage: StagePreview) -> str:
    """A plot of an epoch on the largest number of devices shown."""
    epoch = max(stage.epochs, key=lambda one: one.world)
    curve = epoch.curve
    order = sorted(range(len(stage.buckets)), key=lambda place: -stage.buckets[place].share)
    main_buckets = order if len(order) <= len(_COLOURS) + 1 else order[: len(_COLOURS)]
    other_buckets = [place for place in order if place not in main_buckets]
    bands = [curve.share_PB[:, place] for place in main_buckets]
    names = [(str(stage.buckets[place].bucket), stage.buckets[place].share) for place in main_buckets]
    if other_buckets:
        bands.append(curve.share_PB[:, other_buckets].sum(1))
        names.append((f"{len(other_buckets)} others", sum(stage.buckets[place].share for place in other_buckets)))
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1.2em"><span style="display:inline-block;width:.8em;height:.8em;'
        f'border-radius:2px;background:{_colour(place)}"></span> {text(name)} {share:.1%}</span>'
        for place, (name, share) in enumerate(names)
    )
    devices = "device" if epoch.world == 1 else "devices"
    steps = int(np.diff(curve.steps).max())
    point_meaning = (
        "a step"
        if steps == 1
        else f"the costliest of up to {steps:,} steps in a row, and the greatest imbalance of them"
    )
    return card(
        f"An epoch of {epoch.steps:,} {'step' if epoch.steps == 1 else 'steps'} on {epoch.world:,} {devices}",
        draw(curve, bands, outlook.unit) + f'<p class="sub">{legend}</p>',
        f"Above: cost of a rank in {outlook.unit}, mean over ranks, and on top of it the excess of the busiest. Middle: imbalance,"
        f" greatest / mean. Below: shares of the buckets in the cost. Each point is {point_meaning}.",
    )


def draw(curve: Curve, bands: Sequence[Array], unit: str) -> str:
    """The plot as inline SVG: cost, imbalance and buckets along the steps of an epoch."""
    x = _LEFT + curve.steps / curve.steps[-1] * (_WIDTH - _LEFT - _RIGHT)
    highest = float(curve.greatest.max())
    scale = max(_LEAST_SCALE, float(curve.imbalance.max()) - 1)
    parts = [
        _area(x, curve.greatest / highest, *_PANELS["cost"], 'class="over"'),
        _area(x, curve.mean / highest, *_PANELS["cost"], 'class="bar"'),
        _area(x, (curve.imbalance - 1) / scale, *_PANELS["imbalance"], 'class="over"'),
        *_stacked(x, bands, *_PANELS["buckets"]),
        *_ticks("cost", f"{highest:.3g}", "0", unit),
        *_ticks("imbalance", f"{1 + scale:.2f}", "1", "imbalance"),
        *_ticks("buckets", "", "", "buckets"),
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step 1</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{int(curve.steps[-1]):,}</text>',
    ]
    name = "cost of each step of an epoch, its imbalance over ranks, and its buckets"
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}"><title>{name}</title>'
        f"{''.join(parts)}</svg>"
    )


def _area(x: Array, heights: Array, top: int, bottom: int, look: str) -> str:
    """A stepped area: from x[i] to x[i + 1] its height is `heights[i]`, as a share of the panel."""
    corners = "".join(
        f"V{bottom - height * (bottom - top):.1f}H{right:.1f}"
        for height, right in zip(heights.tolist(), x[1:].tolist(), strict=True)
    )
    return f'<path {look} d="M{x[0]:.1f} {bottom}{corners}V{bottom}Z"/>'


def _stacked(x: Array, bands: Sequence[Array], top: int, bottom: int) -> list[str]:
    """Stacked bands, each of a different colour; at every point they sum to 1."""
    paths, below = [], np.zeros(len(x) - 1)
    edges = list(pairwise(x.tolist()))
    for number, band in enumerate(bands):
        boxes = "".join(
            f"M{left:.1f} {bottom - low * (bottom - top):.1f}H{right:.1f}v{-part * (bottom - top):.1f}H{left:.1f}Z"
            for (left, right), low, part in zip(edges, below.tolist(), band.tolist(), strict=True)
            if part > 0
        )
        paths.append(f'<path fill="{_colour(number)}" d="{boxes}"/>')
        below = below + band
    return paths


def _ticks(panel: str, high: str, low: str, name: str) -> list[str]:
    """A panel's base line, the values at its top and bottom, and its label."""
    top, bottom = _PANELS[panel]
    line = f'<path class="axis" d="M{_LEFT} {bottom + 0.5}H{_WIDTH - _RIGHT}"/>'
    words = [(top + 10, high), ((top + bottom) // 2 + 4, name), (bottom, low)]
    return [
        line,
        *(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{text(word)}</text>' for y, word in words if word),
    ]


def _colour(place: int) -> str:
    return _COLOURS[place] if place < len(_COLOURS) else _OTHERS
