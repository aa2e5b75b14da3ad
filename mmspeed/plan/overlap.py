"""The time of a step whose passes exchange rows between their nodes, and of pairs of passes that take turns: what `mmspeed.parallel.turns` runs.

A node is what a pass computes from one exchange to the next. One lane computes, one has the exchanges.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .schedules import Action, Pair, Pipeline, Table
from .simulate import Simulated, simulate

NO_TIME = 1e-9  # of an exchange, at which passes still take turns
FORWARD, BACKWARD = 0, 1  # the sides of a pair
WIDTH = 8  # partial orders that a search keeps of each length
Order = tuple[int, ...]  # by node: the side that computes its next one


class Node(NamedTuple):
    """Seconds of a node: what it computes, the exchange that it starts, and the gradients of weights that it leaves for later.

    kind: of its exchange, such as `experts`.
    """

    compute: float
    exchange: float = 0.0
    weights: float = 0.0
    kind: str = "experts"


class StageNodes(NamedTuple):
    """The nodes of a stage's passes."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]

    def without(self, kind: str) -> StageNodes:
        """The same with exchanges of this kind that take no time."""

        def free(nodes: Sequence[Node]) -> tuple[Node, ...]:
            return tuple(
                node._replace(exchange=min(node.exchange, NO_TIME)) if node.kind == kind else node for node in nodes
            )

        return StageNodes(free(self.forward), free(self.backward))


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a block, such as attention or experts: its passes, and the exchange between it and the part behind it."""

    forward: float
    input: float
    weights: float
    exchange: float


def nodes_of(parts: Sequence[Part]) -> StageNodes:
    """The nodes of a stage of these parts. Its backward pass begins with the last exchange."""
    before = [0.0, *(part.exchange for part in parts[:-1])]  # what is between a part and the one before it
    back = [Node(part.input, swap, part.weights) for part, swap in zip(reversed(parts), reversed(before), strict=True)]
    forward = tuple(Node(part.forward, part.exchange) for part in parts)
    return StageNodes(forward, (Node(0.0, parts[-1].exchange), *back))


class _Underway(NamedTuple):
    """A pair so far. comes: when the exchange of each side has come; 0: it waits for none. left: seconds of gradients of weights."""

    clock: float = 0.0
    lane: float = 0.0
    comes: tuple[float, float] = (0.0, 0.0)
    left: float = 0.0

    def after(self, side: int, node: Node) -> _Underway:
        """The pair after the next node of a side, which first waits for its exchange. Backward passes compute gradients of weights before."""
        fills = side == BACKWARD and self.comes[side] > 0
        clock = max(self.clock + self.left * fills, self.comes[side]) + node.compute
        left, lane, comes = self.left * (not fills) + node.weights, self.lane, 0.0
        if node.exchange:
            lane = comes = max(lane, clock) + node.exchange
        return _Underway(clock, lane, (comes, self.comes[1]) if side == FORWARD else (self.comes[0], comes), left)

    def ended(self, carries: bool) -> float:
        """When both passes have ended."""
        return max(self.clock + self.left * (not carries), *self.comes)


def alternating(forward: int, backward: int) -> Order:
    """The order in which passes of so many nodes take turns, the backward pass first, since it begins with an exchange."""
    both = itertools.zip_longest([BACKWARD] * backward, [FORWARD] * forward)
    return tuple(side for each in both for side in each if side is not None)


def paired(nodes: StageNodes, order: Order | None = None, carries: bool = True) -> float:
    """Seconds of a pair: the forward pass and the backward pass of these nodes. order: None: they alternate.

    carries: what the last node leaves is computed in the first exchange of the pass that follows, as this one computes what was left before
    it; else at its end.
    """
    pair, sides = _begun(nodes, carries), (iter(nodes.forward), iter(nodes.backward))
    for side in alternating(len(nodes.forward), len(nodes.backward)) if order is None else order:
        pair = pair.after(side, next(sides[side]))
    return pair.ended(carries)


def _begun(nodes: StageNodes, carries: bool) -> _Underway:
    return _Underway(left=nodes.backward[-1].weights if nodes.backward and carries else 0.0)


def alone(backward: Sequence[Node]) -> float:
    """Seconds of a backward pass that runs by itself; gradients of weights are computed while its exchanges are on the way."""
    return paired(StageNodes((), tuple(backward)))


@lru_cache(256)
def best_order(nodes: StageNodes, carries: bool = True) -> tuple[float, Order]:
    """The least seconds of a pair that a search over orders of its nodes finds, and the order; passes alternate where none is better.

    Of orders that come to the same nodes it keeps those that end first.
    """
    usual, least = paired(nodes, None, carries), sum(node.compute + node.weights for side in nodes for node in side)
    if usual <= least * (1 + NO_TIME):  # it computes all the time
        return usual, alternating(*map(len, nodes))
    begun: dict[tuple[int, int], list[tuple[_Underway, Order]]] = {(0, 0): [(_begun(nodes, carries), ())]}
    for _ in range(len(nodes.forward) + len(nodes.backward)):
        longer: dict[tuple[int, int], list[tuple[_Underway, Order]]] = {}
        for done, found in begun.items():
            for side, of_side in enumerate(nodes):
                if done[side] < len(of_side):
                    to = (done[0] + (side == FORWARD), done[1] + (side == BACKWARD))
                    node = of_side[done[side]]
                    longer.setdefault(to, []).extend((pair.after(side, node), (*order, side)) for pair, order in found)
        begun = {to: sorted(found, key=lambda each: _rank(each[0]))[:WIDTH] for to, found in longer.items()}
    (found,) = begun.values()
    least, order = min((pair.ended(carries), order) for pair, order in found)
    return (least, order) if least < usual * (1 - NO_TIME) else (usual, alternating(*map(len, nodes)))


def _rank(pair: _Underway) -> tuple[float, float, float]:
    return pair.clock + pair.left, pair.lane, sum(pair.comes)


class PairOrder(NamedTuple):
    """The order of a pair of stages. seconds: of the pair as simulated; alternating: where its passes alternate. nodes: B and F in order."""

    forward: int
    backward: int
    nodes: str
    seconds: float
    alternating: float

    @property
    def order(self) -> Order:
        """By node, the side that computes its next one."""
        return tuple(map("FB".index, self.nodes))


def orders(table: Table, nodes: Mapping[int, StageNodes], carries: bool) -> list[PairOrder]:
    """The best orders of a table's pairs whose nodes are known, by stage."""
    found = []
    pairs = {(pair.forward.stage, pair.backward.stage) for row in table for pair in row if isinstance(pair, Pair)}
    for ahead, behind in sorted(pairs):
        if ahead in nodes and behind in nodes:
            both = StageNodes(nodes[ahead].forward, nodes[behind].backward)
            seconds, order = best_order(both, carries)
            words = "".join("FB"[side] for side in order)
            found.append(PairOrder(ahead, behind, words, round(seconds, 7), round(paired(both, None, carries), 7)))
    return found


def drifted(before: Mapping[int, StageNodes], now: Mapping[int, StageNodes], by: float = 0.1) -> bool:
    """True where a pass of a stage computes, or exchanges, for a time that is more than `by` of it away from that before."""

    def sums(nodes: Mapping[int, StageNodes]) -> dict[tuple[int, int, int], float]:
        each = {(stage, side): of_side for stage, both in nodes.items() for side, of_side in enumerate(both)}
        computed = {(*key, 0): sum(node.compute + node.weights for node in of_side) for key, of_side in each.items()}
        return computed | {
            (*key, len(of_side)): sum(node.exchange for node in of_side) for key, of_side in each.items()
        }

    old, new = sums(before), sums(now)
    return old.keys() != new.keys() or any(abs(new[key] - value) > by * value for key, value in old.items())


def step_of(
    pipeline: Pipeline, batches: int, stages: Sequence[StageNodes], message: float = 0.0, series: bool = False
) -> Simulated:
    """A step of stages of these nodes, pairs in the best order. message: of a send between ranks. series: passes of a pair run one after the other.

    A pass by itself waits for its exchanges; where gradients of weights are carried, they are computed there.
    """
    carries = pipeline.carries

    def seconds(action: Action) -> float:
        own = stages[action.stage]
        if action.kind == "weight":
            return sum(node.weights for node in own.backward)
        if action.kind == "backward" and carries and not series:
            return alone(own.backward)
        nodes = own.forward if action.kind == "forward" else own.backward
        weights = sum(node.weights for node in nodes) if action.kind == "backward" else 0.0
        return sum(node.compute + node.exchange for node in nodes) + weights

    def pair(entry: Pair) -> float:
        if series:
            return sum(map(seconds, entry.parts))
        both = StageNodes(stages[entry.forward.stage].forward, stages[entry.backward.stage].backward)
        return best_order(both, carries)[0]

    return simulate(pipeline.table(batches), pipeline, seconds, message, pair=pair)


@dataclass(frozen=True)
class Exposed:
    """A step with its exchanges, and the seconds that exchanges of each kind add to it, and `messages` between stages."""

    step: Simulated
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """The share of the step that exchanges of nodes add."""
        return sum(seconds for kind, seconds in self.seconds.items() if kind != "messages") / self.step.step


def exposed(
    pipeline: Pipeline, batches: int, stages: Sequence[StageNodes], message: float = 0.0, series: bool = False
) -> Exposed:
    """What a step's exchanges add: its length less that with those of a kind, or messages, that take no time."""
    whole = step_of(pipeline, batches, stages, message, series)
    free = {"messages": step_of(pipeline, batches, stages, 0.0, series)}
    for kind in sorted({node.kind for stage in stages for nodes in stage for node in nodes if node.exchange}):
        free[kind] = step_of(pipeline, batches, [stage.without(kind) for stage in stages], message, series)
    return Exposed(whole, {kind: whole.step - step.step for kind, step in free.items()})
