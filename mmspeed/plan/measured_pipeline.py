"""A pipeline's step as it was measured: bubble, waits and exchanges, from when each rank's passes and their nodes began and ended."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .overlap import BACKWARD, FORWARD, Node, PairOrder, StageNodes
from .pipeline_picture import Span
from .schedules import Action, Kind, Pair, Pipeline, Table, needs
from .simulate import Simulated, simulate

WAITS = {"forward": "activations", "input": "gradients"}  # by what is waited for


class MeasuredNode(NamedTuple):
    """Seconds of a node: what it computes, and, of its exchange, those filled by gradients of weights and those waited.

    place: that of the wait (`mmspeed.comm.WAITED_AT`); None: another, or no exchange behind the pass's last node.
    """

    computed: float
    filled: float = 0.0
    waited: float = 0.0
    place: str | None = None


class Pass(NamedTuple):
    """A pass by the clock of its rank, from the step's begin there. before: seconds of the rank's own work right before, such as reading data."""

    kind: Kind
    stage: int
    batch: int
    begin: float
    end: float
    before: float
    nodes: Sequence[MeasuredNode] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Pass:
        """The pass of values as JSON gives them back."""
        found = cls(*values)
        return found._replace(nodes=[MeasuredNode(*node) for node in found.nodes])

    def waited(self, place: str) -> float:
        """Seconds of waits at a place."""
        return sum(node.waited for node in self.nodes if node.place == place)


@dataclass(frozen=True)
class MeasuredStep:
    """A step on one clock. exposed: seconds that `messages` between stages add, and exchanges by place; waits: seconds of each rank, by kind.

    Waits for `activations` and for `gradients` of another rank come before passes, `own` is a rank's own work between them, and `end` is
    what comes behind its last pass, where gradients are summed. With the time that a rank computes they make the step.
    """

    step: Simulated
    exposed: dict[str, float]
    waits: dict[str, list[float]]

    def to_json(self, orders: Sequence[PairOrder] = ()) -> str:
        """The spans, and the orders of pairs."""
        spans = [
            [[[[p.kind, p.stage, p.batch] for p in entry.parts], round(begin, 7), round(end, 7)] for entry, begin, end in row]
            for row in self.step.spans
        ]  # fmt: skip
        known = {"orders": [order._asdict() for order in orders]} if orders else {}
        return json.dumps({"seconds": round(self.step.step, 7), "spans": spans, **known}, separators=(",", ":"))


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
    spans, took, passes_of = list[tuple[Span, ...]](), dict[Action, float](), dict[Action, Pass]()
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
            passes_of.update(zip(entry.parts, passes, strict=True))
            own.append((entry, begin, end))
            at = end
        waits["end"][rank] = step - at
        spans.append(tuple(own))
    last = max(row[-1][2] for row in spans if row)
    free = simulate(table, pipeline, took.__getitem__).step
    exposed = {"messages": max(0.0, last - free)}
    for place in sorted({node.place for each in passes_of.values() for node in each.nodes if node.place}):
        shorter = {action: seconds - passes_of[action].waited(place) for action, seconds in took.items()}
        exposed[place] = free - simulate(table, pipeline, shorter.__getitem__).step
    return MeasuredStep(Simulated(step, tuple(spans), ()), exposed, waits)


def measured_nodes(passes: Iterable[Pass], table: Table) -> dict[int, StageNodes]:
    """The nodes of the stages of which passes of both directions were measured by themselves and not as one of a pair: medians.

    A pass by itself waits for its exchanges, so these tell how long they take. Where gradients of weights were computed meanwhile, an exchange
    may have come before: it counts at most as long as the longest of the stage's forward pass.
    """
    paired = {part for row in table for entry in row if isinstance(entry, Pair) for part in entry.parts}
    found: dict[tuple[int, int], list[tuple[bool, Sequence[MeasuredNode]]]] = {}
    for each in passes:
        if each.kind != "weight":
            side = FORWARD if each.kind == "forward" else BACKWARD
            together = Action(each.kind, each.stage, each.batch) in paired
            found.setdefault((each.stage, side), []).append((together, each.nodes))
    nodes: dict[int, StageNodes] = {}
    for stage in sorted({stage for stage, _ in found}):
        ahead, back = (_medians(found.get((stage, side), [])) for side in (FORWARD, BACKWARD))
        if ahead and back:
            most = max(node.exchange for node in ahead)
            left = [
                0.0,
                *(node.weights for node in back[1:-1]),
                back[0].weights,
            ]  # the last node's: filled the next pass's first exchange
            nodes[stage] = StageNodes(
                tuple(node._replace(weights=0.0) for node in ahead),
                tuple(
                    node._replace(exchange=min(most, node.exchange), weights=weights)
                    for node, weights in zip(back, left[-len(back) :], strict=True)
                ),
            )
    return nodes


def _medians(passes: Sequence[tuple[bool, Sequence[MeasuredNode]]]) -> list[Node]:
    """The nodes of passes, each with whether it was one of a pair. Empty where none was by itself."""
    alone = [nodes for together, nodes in passes if not together]
    if not alone:
        return []
    count, median = len(alone[0]), statistics.median
    alone, every = ([nodes for nodes in of if len(nodes) == count] for of in (alone, [nodes for _, nodes in passes]))
    filling = [nodes for together, nodes in passes if together and len(nodes) == count] or alone
    return [
        Node(
            median(nodes[place].computed for nodes in every),
            median(nodes[place].filled + nodes[place].waited for nodes in alone),
            median(nodes[place].filled for nodes in filling),
        )
        for place in range(count)
    ]


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
