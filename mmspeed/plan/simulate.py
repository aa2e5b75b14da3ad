"""Simulate a pipeline's step: events over the very table that runs.

Durations are given: of a stage's passes and of a message between ranks. The bubble is the time in which the busiest rank stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schedules import Action, Table, needs, rank_of


@dataclass(frozen=True)
class Simulated:
    """A step: its length, when each action begins and ends, and each rank's most micro-batches in flight, counted by stages."""

    step: float
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  # by rank
    in_flight: tuple[int, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(end - begin for _, begin, end in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The time for which the busiest rank stands still."""
        return self.step - max(self.busy)


def simulate(table: Table, stages: int, seconds: Callable[[Action], float], message: float = 0.0) -> Simulated:
    """The events of a step. `message`: seconds from one rank to another. Raises ValueError where ranks wait for one another for ever."""
    ranks = len(table)
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in table]
    flying, most = [0] * ranks, [0] * ranks
    left = sum(map(len, table))
    while left:
        before = left
        for rank, row in enumerate(table):
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                before_it = needs(action, stages)
                if not before_it <= ends.keys():
                    break
                comes = (ends[each] + (message if rank_of(each.stage, ranks) != rank else 0.0) for each in before_it)
                begin = max([spans[rank][-1][2] if spans[rank] else 0.0, *comes])
                ends[action] = begin + seconds(action)
                spans[rank].append((action, begin, ends[action]))
                flying[rank] += 1 if action.kind == "forward" else -1
                most[rank] = max(most[rank], flying[rank])
                left -= 1
        if left == before:
            raise ValueError("ranks wait for one another for ever")
    return Simulated(max(row[-1][2] for row in spans if row), tuple(map(tuple, spans)), tuple(most))
