"""Simulate a pipeline's step: events over the very table that runs, on two lanes of each rank: its passes, and what it sends to others.

Durations are given: of a stage's passes with their exchanges (`mmspeed.plan.overlap`), of pairs, and of a message between ranks. The bubble
is the time in which the busiest rank stands still.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .schedules import Action, Pair, Pipeline, Table, gives, needs


@dataclass(frozen=True)
class Simulated:
    """A step: its length, when each entry of its table begins and ends, each rank's most micro-batches in flight, counted by stages.

    kept: the most that each rank keeps for backward passes: bytes; none of a measured step.
    """

    step: float
    spans: tuple[tuple[tuple[Action | Pair, float, float], ...], ...]  # by rank
    in_flight: tuple[int, ...]
    kept: tuple[float, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(end - begin for _, begin, end in row) for row in self.spans)

    @property
    def waits(self) -> tuple[float, ...]:
        """The time for which each rank stands still."""
        return tuple(self.step - each for each in self.busy)

    @property
    def idle(self) -> float:
        """The share of the step for which the busiest rank stands still."""
        return self.bubble / self.step

    @property
    def bubble(self) -> float:
        """The time for which the busiest rank stands still."""
        return min(self.waits)


def reckoned(pipeline: Pipeline, batches: int) -> Simulated:
    """A step of equal stages, whose passes for the gradients of input and weights take as long as the forward ones; free messages."""
    return simulate(pipeline.table(batches), pipeline, lambda action: 2.0 if action.kind == "backward" else 1.0)


def picture(step: Simulated, unit: float = 1.0) -> list[str]:
    """A line for each rank: in each unit of time the micro-batch whose forward pass (digits), backward pass (letters) or pass for weights (capitals) runs, or a dot."""
    lines = []
    for rank, row in enumerate(step.spans):
        cells = ["."] * round(step.step / unit)
        for entry, begin, end in row:
            each = (end - begin) / len(entry.parts)
            for place, part in enumerate(entry.parts):
                base, signs = {"forward": ("0", 10), "weight": ("A", 26)}.get(part.kind, ("a", 26))
                first, last = (round((begin + each * (place + more)) / unit) for more in (0, 1))
                cells[first:last] = [chr(ord(base) + part.batch % signs)] * (last - first)
        lines.append(f"{rank:>3} {''.join(cells)}")
    return lines


def simulate(
    table: Table,
    pipeline: Pipeline,
    seconds: Callable[[Action], float],
    message: float | Callable[[Action], float] = 0.0,
    *,
    pair: Callable[[Pair], float] | None = None,
    kept: Callable[[Action], float] = lambda action: 0.0,
) -> Simulated:
    """The events of a step. Raises ValueError where ranks wait for one another for ever.

    seconds: of an action. message: what a pass (`forward`, `input`) gives to another rank is on the way; a rank sends one after another.
    pair: of one; None: of its actions, one after the other. kept: bytes that a stage keeps of a forward action until it has the gradients
    of its weights.
    """
    came: dict[Action, float] = {}  # when what a pass gives is where it goes
    spans: list[list[tuple[Action | Pair, float, float]]] = [[] for _ in table]
    clocks, sent = [0.0] * len(table), [0.0] * len(table)  # when each rank has computed, and sent, all so far
    left = sum(map(len, table))
    while left:
        before = left
        for rank, row in enumerate(table):
            while len(spans[rank]) < len(row):
                entry = row[len(spans[rank])]
                wanted = needs(entry, pipeline)
                if not wanted <= came.keys():
                    break
                begin = max([clocks[rank], *(came[each] for each in wanted if pipeline.rank_of(each.stage) != rank)])
                end = clocks[rank] = begin + (
                    pair(entry) if pair and isinstance(entry, Pair) else sum(map(seconds, entry.parts))
                )
                spans[rank].append((entry, begin, end))
                for done in (each for part in entry.parts for each in gives(part)):
                    came[done] = end
                    if _is_sent(done, pipeline):
                        way = message(done) if callable(message) else message
                        came[done] = sent[rank] = max(end, sent[rank]) + way
                left -= 1
        if left == before:
            raise ValueError("ranks wait for one another for ever")
    flying = tuple(int(_most(row, lambda _: 1)) for row in table)
    return Simulated(max(clocks), tuple(map(tuple, spans)), flying, tuple(_most(row, kept) for row in table))


def _most(row: Sequence[Action | Pair], size: Callable[[Action], float]) -> float:
    """The most that a rank holds: of each forward pass its size, until its stage has the gradients of its weights."""
    signs = {"forward": 1, "weight": -1, "input": 0}
    changes = ((signs[done.kind], done) for entry in row for part in entry.parts for done in gives(part))
    held = (sign and sign * size(Action("forward", done.stage, done.batch)) for sign, done in changes)
    return max(itertools.accumulate(held), default=0)


def _is_sent(done: Action, pipeline: Pipeline) -> bool:
    """True for a pass whose result goes to another rank."""
    to = done.stage + {"forward": 1, "input": -1, "weight": 0, "backward": 0}[done.kind]
    return 0 <= to < pipeline.stages and pipeline.rank_of(to) != pipeline.rank_of(done.stage)
