"""Simulate a pipeline's step: events over the very table that runs, on four lanes of each rank: computing, inner link, outer link, sends.

Durations are given: of a stage's passes, of what they exchange, and of a message between ranks. What an action exchanges is hidden behind the
other action of its pair alone, but for what goes ahead of it or behind it. The bubble is the time in which the busiest rank stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from .schedules import Action, Pair, Pipeline, Table, gives, needs

Lane = Literal["inner", "outer"]


@dataclass(frozen=True)
class Exchange:
    """What an action exchanges with the ranks that hold its stage, such as rows of experts.

    when: `inside` the action, which waits for it; `ahead` of it, while the entry before it runs (gathers of weights); `behind` it, while those
    after it run (sums of gradients).
    """

    kind: str
    lane: Lane
    seconds: float
    when: Literal["ahead", "inside", "behind"] = "inside"


@dataclass(frozen=True)
class Simulated:
    """A step: its length, when each entry of its table begins and ends, each rank's most micro-batches in flight, counted by stages.

    kept: the most that each rank keeps for backward passes: bytes.
    """

    step: float
    spans: tuple[tuple[tuple[Action | Pair, float, float], ...], ...]  # by rank
    in_flight: tuple[int, ...]
    kept: tuple[float, ...]

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


Exchanges = Callable[[Action], Iterable[Exchange]]


@dataclass
class _Rank:
    """A rank on its way through a step."""

    spans: list[tuple[Action | Pair, float, float]] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)  # when each lane is: seconds
    behind: list[Exchange] = field(default_factory=list)  # of the last entry
    flying: int = 0
    most: int = 0
    bytes: float = 0.0
    kept: float = 0.0

    def take(self, lane: str, begin: float, seconds: float) -> float:
        """The end of what goes over a lane as soon as that is free."""
        self.free[lane] = max(begin, self.free.get(lane, 0.0)) + seconds
        return self.free[lane]

    def run(
        self, entry: Action | Pair, came: float, computes: float, alone: list[float], swaps: list[list[Exchange]]
    ) -> float:
        """The end of the next entry, whose input came then. alone, swaps: seconds that each part computes by itself, and its exchanges."""
        _, before, begin = self.spans[-1] if self.spans else (entry, 0.0, 0.0)
        ahead = [self.take(each.lane, before, each.seconds) for swap in swaps for each in swap if each.when == "ahead"]
        self.end()
        begin = max([begin, came, *ahead])
        inside = [[each for each in swap if each.when == "inside"] for swap in swaps]
        ends = [begin + own + sum(each.seconds for each in swap) for own, swap in zip(alone, inside, strict=True)]
        links = [self.take(each.lane, begin, each.seconds) for swap in inside for each in swap]
        self.spans.append((entry, begin, max([begin + computes, *ends, *links])))
        self.behind = [each for swap in swaps for each in swap if each.when == "behind"]
        return self.spans[-1][2]

    def end(self) -> float:
        """The end of all that goes on here."""
        end = self.spans[-1][2] if self.spans else 0.0
        for each in self.behind:
            self.take(each.lane, end, each.seconds)
        self.behind = []
        return max([end, *self.free.values()])

    def hold(self, done: Action, size: Callable[[Action], float]) -> None:
        """Count what a forward pass keeps, until the gradients of weights are there."""
        more = {"forward": 1, "weight": -1}.get(done.kind, 0)
        if more:
            self.flying += more
            self.bytes += more * size(Action("forward", done.stage, done.batch))
            self.most, self.kept = max(self.most, self.flying), max(self.kept, self.bytes)


def simulate(
    table: Table,
    pipeline: Pipeline,
    seconds: Callable[[Action], float],
    message: float | Callable[[Action], float] = 0.0,
    *,
    exchanges: Exchanges = lambda action: (),
    pair: Callable[[Pair], float] | None = None,
    kept: Callable[[Action], float] = lambda action: 0.0,
) -> Simulated:
    """The events of a step. Raises ValueError where ranks wait for one another for ever.

    seconds: an action computes. message: what a pass (`forward`, `input`) gives to another rank is on the way; a rank sends one after another.
    exchanges: of an action. pair: the actions of a pair compute together; by themselves as long as both. kept: bytes that a stage keeps of a
    forward action until it has the gradients of its weights.
    """
    ranks = [_Rank() for _ in table]
    came: dict[Action, float] = {}  # when what a pass gives is where it goes
    left = sum(map(len, table))
    while left:
        before = left
        for number, (rank, row) in enumerate(zip(ranks, table, strict=True)):
            while len(rank.spans) < len(row):
                entry = row[len(rank.spans)]
                wanted = needs(entry, pipeline)
                if not wanted <= came.keys():
                    break
                far = [came[each] for each in wanted if pipeline.rank_of(each.stage) != number]
                alone = list(map(seconds, entry.parts))
                computes = pair(entry) if pair and isinstance(entry, Pair) else sum(alone)
                end = rank.run(entry, max(far, default=0.0), computes, alone, [list(exchanges(p)) for p in entry.parts])
                for done in (each for part in entry.parts for each in gives(part)):
                    sends = _is_sent(done, pipeline)
                    lasts = message(done) if sends and callable(message) else message
                    came[done] = rank.take("sends", end, lasts) if sends else end
                    rank.hold(done, kept)
                left -= 1
        if left == before:
            raise ValueError("ranks wait for one another for ever")
    return Simulated(
        max(rank.end() for rank in ranks),
        tuple(tuple(rank.spans) for rank in ranks),
        tuple(rank.most for rank in ranks),
        tuple(rank.kept for rank in ranks),
    )


def _is_sent(done: Action, pipeline: Pipeline) -> bool:
    """True for a pass whose result goes to another rank."""
    to = done.stage + {"forward": 1, "input": -1, "weight": 0, "backward": 0}[done.kind]
    return 0 <= to < pipeline.stages and pipeline.rank_of(to) != pipeline.rank_of(done.stage)


def exposed(
    table: Table,
    pipeline: Pipeline,
    seconds: Callable[[Action], float],
    message: float | Callable[[Action], float] = 0.0,
    *,
    exchanges: Exchanges,
    pair: Callable[[Pair], float] | None = None,
) -> dict[str, float]:
    """Seconds by which a step is longer for each kind of exchange, and for `messages` between stages: its length less that with those free."""

    def step(message: float | Callable[[Action], float], free: str | None = None) -> float:
        def left(action: Action) -> Iterable[Exchange]:
            return [each for each in exchanges(action) if each.kind != free]

        return simulate(table, pipeline, seconds, message, exchanges=left, pair=pair).step

    kinds = {each.kind for row in table for entry in row for part in entry.parts for each in exchanges(part)}
    whole = step(message)
    return {"messages": whole - step(0.0)} | {kind: whole - step(message, kind) for kind in sorted(kinds)}
