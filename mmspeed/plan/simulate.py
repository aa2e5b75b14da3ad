"""Simulate a pipeline's step: events over the very table that runs.

Durations are given: of a stage's passes and of a message between ranks. The bubble is the time in which the busiest rank stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schedules import Action, Pair, Pipeline, Table, gives, needs


@dataclass(frozen=True)
class Simulated:
    """A step: its length, when each entry of its table begins and ends, and each rank's most micro-batches in flight, counted by stages."""

    step: float
    spans: tuple[tuple[tuple[Action | Pair, float, float], ...], ...]  # by rank
    in_flight: tuple[int, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(end - begin for _, begin, end in row) for row in self.spans)

    @property
    def idle(self) -> float:
        """The share of the step for which the busiest rank stands still."""
        return self.bubble / self.step

    @property
    def bubble(self) -> float:
        """The time for which the busiest rank stands still."""
        return self.step - max(self.busy)


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


def simulate(table: Table, pipeline: Pipeline, seconds: Callable[[Action], float], message: float = 0.0) -> Simulated:
    """The events of a step. `message`: seconds from one rank to another. Raises ValueError where ranks wait for one another for ever.

    A pair takes as long as both of its passes.
    """
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action | Pair, float, float]]] = [[] for _ in table]
    flying, most = [0] * len(table), [0] * len(table)
    left = sum(map(len, table))
    while left:
        before = left
        for rank, row in enumerate(table):
            while len(spans[rank]) < len(row):
                entry = row[len(spans[rank])]
                wanted = needs(entry, pipeline)
                if not wanted <= ends.keys():
                    break
                comes = (ends[each] + (message if pipeline.rank_of(each.stage) != rank else 0.0) for each in wanted)
                begin = max([spans[rank][-1][2] if spans[rank] else 0.0, *comes])
                end = begin + sum(map(seconds, entry.parts))
                spans[rank].append((entry, begin, end))
                for done in (each for part in entry.parts for each in gives(part)):
                    ends[done] = end
                    flying[rank] += {"forward": 1, "weight": -1}.get(done.kind, 0)
                    most[rank] = max(most[rank], flying[rank])
                left -= 1
        if left == before:
            raise ValueError("ranks wait for one another for ever")
    return Simulated(max(row[-1][2] for row in spans if row), tuple(map(tuple, spans)), tuple(most))
