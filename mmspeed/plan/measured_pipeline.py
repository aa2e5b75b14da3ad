"""A pipeline's step as it was measured: bubble, waits and exchanges, from when each rank's passes began and ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .pipeline_picture import Span
from .schedules import Action, Kind, Pair, Pipeline, Table, needs
from .simulate import Simulated, simulate

WAITS = {"forward": "activations", "input": "gradients"}  # by what is waited for


class Pass(NamedTuple):
    """A pass by the clock of its rank, from the step's begin there. before: seconds of the rank's own work right before, such as reading data."""

    kind: Kind
    stage: int
    batch: int
    begin: float
    end: float
    before: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step on one clock. exposed: seconds that exchanges between stages add; waits: seconds of each rank, by kind.

    Waits for `activations` and for `gradients` of another rank come before passes, `own` is a rank's own work between them, and `end` is
    what comes behind its last pass, where gradients are summed. With the time that a rank computes they make the step.
    """

    step: Simulated
    exposed: float
    waits: dict[str, list[float]]

    def to_json(self) -> str:
        """The spans alone."""
        spans = [
            [[[[p.kind, p.stage, p.batch] for p in entry.parts], round(begin, 7), round(end, 7)] for entry, begin, end in row]
            for row in self.step.spans
        ]  # fmt: skip
        return json.dumps({"seconds": round(self.step.step, 7), "spans": spans}, separators=(",", ":"))


def spans_of(text: str) -> list[list[Span]]:
    """The spans that `to_json` wrote. Raises ValueError, KeyError or TypeError for another text."""

    def entry(parts: Sequence[Any]) -> Action | Pair:
        actions = [Action(*part) for part in parts]
        return actions[0] if len(actions) == 1 else Pair(*actions)

    return [[(entry(parts), begin, end) for parts, begin, end in row] for row in json.loads(text)["spans"]]


def measured_step(ranks: Sequence[tuple[Sequence[Pass], float]], pipeline: Pipeline, batches: int) -> MeasuredStep:
    """A step of so many micro-batches by its ranks, each with its passes and the seconds from its begin to its end.

    Each rank's clock begins with its step. Clocks are moved by as little as lets no message come before it was sent.
    """
    table = pipeline.table(batches)
    found = [{Action(each.kind, each.stage, each.batch): each for each in passes} for passes, _ in ranks]
    starts = _starts(found, table, pipeline)
    first = min(starts)
    step = max(start + length for start, (_, length) in zip(starts, ranks, strict=True)) - first
    spans, took = list[tuple[Span, ...]](), dict[Action, float]()
    waits: dict[str, list[float]] = {kind: [0.0] * len(table) for kind in (*WAITS.values(), "own", "end")}
    for rank, row in enumerate(table):
        own, at, shift = list[Span](), 0.0, starts[rank] - first
        for entry in row:
            passes = [found[rank][part] for part in entry.parts]
            begin, end = min(p.begin for p in passes) + shift, max(p.end for p in passes) + shift
            work = min(begin - at, sum(p.before for p in passes))
            kinds = {WAITS[each.kind] for each, _ in _come(entry, rank, pipeline)}
            waits["own"][rank] += work
            waits[min(kinds) if kinds else "own"][rank] += begin - at - work
            took.update((part, (end - begin + work) / len(passes)) for part in entry.parts)
            own.append((entry, begin, end))
            at = end
        waits["end"][rank] = step - at
        spans.append(tuple(own))
    last = max(row[-1][2] for row in spans if row)
    free = simulate(table, pipeline, took.__getitem__).step
    return MeasuredStep(Simulated(step, tuple(spans), ()), max(0.0, last - free), waits)


def _come(entry: Action | Pair, rank: int, pipeline: Pipeline) -> Iterator[tuple[Action, int]]:
    """What an entry gets from other ranks, and from which."""
    for each in needs(entry, pipeline):
        if pipeline.rank_of(each.stage) != rank:
            yield each, pipeline.rank_of(each.stage)


def _starts(found: Sequence[dict[Action, Pass]], table: Table, pipeline: Pipeline) -> list[float]:
    """When the step begins on each rank, by the clock of the first one."""
    least: dict[tuple[int, int], float] = {}  # from a message's end of sending to the begin of the pass that it is for
    for rank, row in enumerate(table):
        for entry in row:
            for each, source in _come(entry, rank, pipeline):
                sent = found[source].get(each) or found[source][Action("backward", each.stage, each.batch)]
                took = min(found[rank][part].begin for part in entry.parts) - sent.end
                least[source, rank] = min(took, least.get((source, rank), took))
    starts = [0.0]
    for rank in range(1, len(table)):
        before, after = least.get((rank - 1, rank), 0.0), least.get((rank, rank - 1), 0.0)
        starts.append(starts[-1] + (max(0.0, -before) or min(0.0, after)))
    return starts
