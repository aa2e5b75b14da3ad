"""Results of sparse attention in the layers of a trained run, their plot, and the suggested settings: figures only, no measuring."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from .attention_bench import AttentionRow

# times faster, forward + backward over all self-attention, below which sparse attention is not worth its error
PAYS = 1.1
DEFAULT_LEAST_TOKENS = 1024  # of `model.sparse.min_tokens`
ACROSS = 4  # panels of a plot
COLOURS = {"clusters": "#1f5fa8", "tiles": "#c2561a", "window": "#3d8a4e", "skip": "#7d5aa6"}


@dataclass(frozen=True)
class MethodResult:
    """A method in a layer, over all samples and noise levels. Lists are by head."""

    planner: str
    tail: str
    keep: float  # requested share
    kept: list[float]
    errors: list[float]  # relative, in the L2 norm, of the head's output
    error: float  # of all heads together

    @property
    def method(self) -> tuple[str, str]:
        return self.planner, self.tail


@dataclass(frozen=True)
class LayerResult:
    """The self-attention of a block. Lists are by head."""

    block: int
    span: str
    tokens: int  # that a query sees
    entropy: list[float]  # of attention, relative to that of uniform attention: 1 is flat
    mass_share: list[float]  # of the keys that hold 90 % of a query's mass, at least
    points: list[MethodResult]

    def error(self, method: tuple[str, str], keep: float) -> float:
        return next(point.error for point in self.points if point.method == method and math.isclose(point.keep, keep))


@dataclass(frozen=True)
class SparseSuggestion:
    """The config block, None where attention should stay dense, and why."""

    settings: dict[str, Any] | None
    reason: str

    def lines(self) -> list[str]:
        if self.settings is None:
            return [self.reason]
        return [self.reason, "", *yaml.safe_dump(self.settings, sort_keys=False).splitlines()]


@dataclass(frozen=True)
class SparseChoice:
    """Settings that meet the error, and their gain. `faster`: forward + backward of all measured self-attention."""

    spans: str
    method: tuple[str, str]
    keep: float
    dense_first: int
    dense_last: int
    faster: float
    worst: float


def fewest_dense(bad: Sequence[int], depth: int) -> tuple[int, int] | None:
    """(first, last): the fewest blocks at both ends that hold all of `bad`; None when that is all of them."""
    ends = None
    for first in range(depth):
        rest = [block for block in bad if block >= first]
        last = depth - min(rest) if rest else 0
        if first + last < depth and (ends is None or first + last < sum(ends)):
            ends = (first, last)
    return ends


def choices(
    layers: Sequence[LayerResult], timings: dict[str, list[AttentionRow]], depth: int, budget: float
) -> list[SparseChoice]:
    """The settings whose sparse layers stay within the error, the fastest first."""
    options_within = []
    spans = list(dict.fromkeys(layer.span for layer in layers))
    options = [("all", spans)] if len(spans) == 1 else [("all", spans), *((span, [span]) for span in spans)]
    for name, chosen in options:
        within = [layer for layer in layers if layer.span in chosen]
        for method, keep in dict.fromkeys((p.method, p.keep) for p in within[0].points):
            errors = {layer.block: layer.error(method, keep) for layer in within}
            ends = fewest_dense([block for block, error in errors.items() if error > budget], depth)
            if ends is None:
                continue
            first, last = ends
            sparse = [layer for layer in within if first <= layer.block < depth - last]
            if sparse:
                faster = _faster(layers, sparse, timings, method, keep)
                worst = max(errors[layer.block] for layer in sparse)
                options_within.append(SparseChoice(name, method, keep, first, last, faster, worst))
    return sorted(options_within, key=lambda choice: (-choice.faster, choice.worst))


def _faster(
    layers: Sequence[LayerResult],
    sparse: Sequence[LayerResult],
    timings: dict[str, list[AttentionRow]],
    method: tuple[str, str],
    keep: float,
) -> float:
    """The speedup: time of all layers when all are dense, divided by that when some are sparse."""
    dense_time = new_time = 0.0
    for layer in layers:
        row = next(r for r in timings[layer.span] if (r.planner, r.tail) == method and math.isclose(r.keep, keep))
        seconds = row.both_seconds * row.both.wall
        dense_time += seconds
        new_time += row.both_seconds if layer in sparse else seconds
    return dense_time / new_time


def suggest(
    layers: Sequence[LayerResult],
    timings: dict[str, list[AttentionRow]],
    depth: int,
    budget: float,
    extra: Callable[[SparseChoice], dict[str, Any]],
) -> SparseSuggestion:
    """The fastest settings whose error is within the budget in every sparse layer, if they gain enough time.

    Args:
        timings: rows of each span, one for each method and kept share.
        extra: further settings of a choice: sizes of clusters, tiles or windows.
    """
    if not layers:
        return SparseSuggestion(None, "Keep attention dense.")
    tokens = " and ".join(f"{n:,}" for n in sorted({layer.tokens for layer in layers}))
    fastest = max((row for rows in timings.values() for row in rows), key=lambda row: row.both.wall)
    if fastest.both.wall < PAYS:
        return SparseSuggestion(
            None,
            f"Keep attention dense: at {tokens} tokens sparse attention does not pay on this device, whatever its error (the fastest, "
            f"{fastest.planner} + {fastest.tail} at {fastest.kept:.2f} kept, is {fastest.both.wall:.2f}x as fast as dense, forward + "
            "backward).",
        )
    within_budget = choices(layers, timings, depth, budget)
    if not within_budget:
        worst, nearest = min(
            ((max(layer.error(p.method, p.keep) for layer in layers), p) for p in layers[0].points),
            key=lambda pair: pair[0],
        )
        return SparseSuggestion(
            None,
            f"Keep attention dense: no setting has an error of {budget:g} or less (the nearest, {nearest.planner} + {nearest.tail} at "
            f"{nearest.keep:g} kept, has up to {worst:.2f}); allow more with --error, or try to keep more with --keep. Training adapts "
            "to some of it.",
        )
    best_choice = within_budget[0]
    planner, tail = best_choice.method
    described = f"{planner} + {tail} at {best_choice.keep:g} kept"
    if best_choice.faster < PAYS:
        return SparseSuggestion(
            None,
            f"Keep attention dense: at {tokens} tokens sparse attention does not pay on this device within an error of {budget:g} (the "
            f"fastest setting, {described}, is {best_choice.faster:.2f}x as fast as dense, forward + backward); allow more with --error.",
        )
    sparse: dict[str, Any] = {"planner": planner, "tail": tail, "keep": best_choice.keep, **extra(best_choice)}
    if best_choice.spans != "all":
        sparse["spans"] = best_choice.spans
    sparse |= {"dense_first": best_choice.dense_first, "dense_last": best_choice.dense_last}
    shortest = min(layer.tokens for layer in layers)
    if shortest < DEFAULT_LEAST_TOKENS:
        sparse["min_tokens"] = shortest
    return SparseSuggestion(
        {"model": {"sparse": sparse}},
        f"Suggested: {described}, which makes the self-attention that was measured {best_choice.faster:.2f}x as fast (forward + backward, "
        f"planning included) with an error of {best_choice.worst:.2f} at most in any sparse layer"
        + (_dense_note(best_choice) if best_choice.dense_first + best_choice.dense_last else "")
        + ".",
    )


def _dense_note(choice: SparseChoice) -> str:
    return f"; blocks that stay dense, where it would be larger: the first {choice.dense_first}, the last {choice.dense_last}"


@dataclass(frozen=True)
class RunResult:
    """The results of a run. `notes` list the spans that were left out, and why."""

    run: str
    checkpoint: str
    device_name: str
    samples: list[str]
    levels: list[float]
    layers: list[LayerResult]
    timings: dict[str, list[AttentionRow]]  # by span
    notes: list[str]
    suggestion: SparseSuggestion
    written: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def lines(self) -> list[str]:
        """Tables and the suggestion."""
        lines = [
            f"{self.run}, {self.checkpoint}, on {self.device_name}: {len(self.samples)} samples at noise {_words(self.levels, '')}",
            *self.notes,
            "",
        ]
        if self.layers:
            lines += [*self.layer_lines(), "", *self.head_lines(), "", *self.speed_lines(), ""]
        return [*lines, *self.suggestion.lines(), *(f"written: {path}" for path in self.written)]

    def layer_lines(self) -> list[str]:
        """Error of each layer, by method, at each kept share."""
        methods = list(dict.fromkeys(point.method for point in self.layers[0].points))
        keeps = list(dict.fromkeys(point.keep for point in self.layers[0].points))
        rows = [["block", "span", "tokens", *(f"{planner} {tail}" for planner, tail in methods)]]
        for layer in self.layers:
            cells = ["/".join(f"{layer.error(method, keep):.2f}" for keep in keeps) for method in methods]
            rows.append([str(layer.block), layer.span, f"{layer.tokens:,}", *cells])
        return [f"error of the output at {_words(keeps, '/')} kept", *_aligned(rows)]

    def head_lines(self) -> list[str]:
        """The statistics of each head, and its error with the first method at the middle share."""
        keeps = sorted({point.keep for point in self.layers[0].points})
        keep, method = keeps[len(keeps) // 2], self.layers[0].points[0].method
        rows = [["block", "90 % of the mass on", "entropy", f"{method[0]} {method[1]} at {keep:g}: error", "kept"]]
        for layer in self.layers:
            point = next(p for p in layer.points if p.method == method and p.keep == keep)
            values = (layer.mass_share, layer.entropy, point.errors, point.kept)
            rows.append([str(layer.block), *(_words(list(value), " ", 2) for value in values)])
        return ["by head", *_aligned(rows)]

    def speed_lines(self) -> list[str]:
        """Speedups over dense attention, by span."""
        rows = [["span", "tokens", "planner", "tail", "kept", "forward", "with backward", "kernel"]]
        for span, timed in self.timings.items():
            for row in timed:
                speeds = [str(row.forward), str(row.both)]
                rows.append([span, f"{row.tokens:,}", row.planner, row.tail, f"{row.kept:.2f}", *speeds, row.backend])
        return ["times faster than dense attention, planning included", *_aligned(rows)]


def _words(values: Sequence[float], between: str, digits: int | None = None) -> str:
    return (between or ", ").join(f"{v:g}" if digits is None else f"{v:.{digits}f}" for v in values)


def _aligned(rows: list[list[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip() for row in rows]


def plot(layers: Sequence[LayerResult]) -> bytes:
    """A PNG of error against kept share: a panel for each layer, a line for each planner; with the summary tail solid, without a tail dashed."""
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
