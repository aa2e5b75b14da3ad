"""The time of a pair of passes that take turns, node by node: the clock of what `mmspeed.parallel.turns` runs.

A node is what a pass computes from one exchange to the next. One lane computes, one has the exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .schedules import Pipeline
from .simulate import Simulated, simulate

NO_TIME = 1e-9  # of an exchange, at which passes still take turns


@dataclass(frozen=True)
class Node:
    """Seconds of a node: what it computes, the exchange that it starts, and the gradients of weights that it leaves for later."""

    compute: float
    exchange: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a block, such as attention or experts: its passes, and the exchange between it and the part behind it."""

    forward: float
    input: float
    weights: float
    exchange: float


def nodes_of(parts: Sequence[Part]) -> tuple[list[Node], list[Node]]:
    """The nodes of a stage's forward pass and of its backward pass, which begins with the last exchange."""
    before = [0.0, *(part.exchange for part in parts[:-1])]  # what is between a part and the one before it
    back = [Node(part.input, swap, part.weights) for part, swap in zip(reversed(parts), reversed(before), strict=True)]
    return [Node(part.forward, part.exchange) for part in parts], [Node(0.0, parts[-1].exchange), *back]


def paired(forward: Sequence[Node], backward: Sequence[Node], ahead: int = -1, carries: bool = True) -> float:
    """Seconds of a pair. ahead: as of `mmspeed.parallel.turns.Turns`.

    carries: what the last node leaves is computed in the first exchange of the pass that follows, as this one computes what was left before
    it; else at its end.
    """
    sides = [list(forward), list(backward)]
    first = 0 if ahead >= 0 else 1
    lead, now = max(1, abs(ahead)) - 1, first
    clock = lane = 0.0
    left = backward[-1].weights if backward and carries else 0.0  # of gradients of weights
    # by side: when its exchange has come, its next node, whether it waits for its exchange
    comes, at, waits = [0.0, 0.0], [0, 0], [False, False]
    while at[0] < len(forward) or at[1] < len(backward):
        if waits[now]:
            if now == 1:
                clock, left = clock + left, 0.0
            clock, waits[now] = max(clock, comes[now]), False
        if at[now] == len(sides[now]):
            now = 1 - now
            continue
        node = sides[now][at[now]]
        at[now] += 1
        clock, left = clock + node.compute, left + node.weights
        if node.exchange:
            lane = comes[now] = max(lane, clock) + node.exchange
            waits[now] = True
            if lead:
                lead -= 1
            elif at[1 - now] < len(sides[1 - now]) or waits[1 - now]:
                now = 1 - now
    return max([clock + left * (not carries), *(come for come, wait in zip(comes, waits, strict=True) if wait)])


def alone(nodes: Sequence[Node]) -> float:
    """Seconds of a pass that runs by itself; gradients of weights are computed while its exchanges are on the way."""
    return paired((), nodes, -1)


def best_order(forward: Sequence[Node], backward: Sequence[Node], carries: bool = True) -> tuple[float, int]:
    """The least seconds of a pair, and the lead that gives them (`ahead`); of equal ones the shortest lead."""
    most = max(len(forward), len(backward))
    leads = sorted((lead for lead in range(-most, most + 1) if lead), key=lambda lead: (abs(lead), -lead))
    return min((paired(forward, backward, lead, carries), place, lead) for place, lead in enumerate(leads))[::2]


@dataclass(frozen=True)
class Exposed:
    """A step with its exchanges, and the same with exchanges that take no time."""

    step: Simulated
    free: Simulated

    @property
    def share(self) -> float:
        """The share of the step that its exchanges add."""
        return (self.step.step - self.free.step) / self.step.step


def exposed(pipeline: Pipeline, batches: int, parts: Sequence[Part], message: float = 0.0) -> Exposed:
    """What a step's exchanges add; every stage has the same parts, in the best order. message: of a send between ranks."""
    forward, backward = nodes_of(parts)

    def run(ahead: Sequence[Node], back: Sequence[Node]) -> Simulated:
        pair = best_order(ahead, back, not pipeline.splits)[0]
        lasts = {
            "forward": sum(node.compute + node.exchange for node in ahead),
            "input": sum(node.compute + node.exchange for node in back),
            "weight": sum(node.weights for node in back),
        }
        lasts["backward"] = (
            alone(back) if pipeline.overlaps and not pipeline.splits else lasts["input"] + lasts["weight"]
        )
        table = pipeline.table(batches)
        return simulate(table, pipeline, lambda action: lasts[action.kind], message, pair=lambda _: pair)

    def free(nodes: Sequence[Node]) -> list[Node]:
        return [replace(node, exchange=min(node.exchange, NO_TIME)) for node in nodes]

    return Exposed(run(forward, backward), run(free(forward), free(backward)))
