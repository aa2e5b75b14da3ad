"""Simulate a pipeline's step: events over the very table that runs.

Durations are given: of a stage's passes and of a message between ranks. The bubble is the time in which the busiest rank stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .schedules import Action, Table, interleaved, needs, rank_of


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
    def idle(self) -> float:
        """The share of the step for which the busiest rank stands still."""
        return self.bubble / self.step

    @property
    def bubble(self) -> float:
        """The time for which the busiest rank stands still."""
        return self.step - max(self.busy)


def reckoned(ranks: int, virtual: int, batches: int, more: int = 0) -> Simulated:
    """A step of interleaved 1F1B with equal stages, whose backward passes take twice as long as the forward ones; free messages."""
    table = interleaved(ranks, virtual, batches, more)
    return simulate(table, ranks * virtual, lambda action: 1.0 if action.kind == "forward" else 2.0)


def picture(step: Simulated, unit: float = 1.0) -> list[str]:
    """A line for each rank: in each unit of time the micro-batch whose forward pass (digits) or backward pass (letters) runs, or a dot."""
    lines = []
    for rank, row in enumerate(step.spans):
        cells = ["."] * round(step.step / unit)
        for action, begin, end in row:
            base, signs = ("0", 10) if action.kind == "forward" else ("a", 26)
            sign = chr(ord(base) + action.batch % signs)
            cells[round(begin / unit) : round(end / unit)] = [sign] * (round(end / unit) - round(begin / unit))
        lines.append(f"{rank:>3} {''.join(cells)}")
    return lines


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
