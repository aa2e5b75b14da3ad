"""Schedules of a pipeline as tables: the actions of each rank in order. The table that runs is the table that is simulated.

- `1f1b` (PipeDream-Flush) has one stage a rank; `interleaved` (Narayanan et al. 2021) `virtual`, every P-th of them. Micro-batches come in groups
  as even as they can be, larger first: so any number of them keeps the bubble (P - 1) x (F + B) / virtual.
- `overlap` is `interleaved` with one more warm-up, without which a pair would wait for itself, whose forward and backward passes are pairs;
  the first rank, which has fewest, waits as long.
- `zb_h1` (Qi et al. 2024) is 1F1B whose passes for weights fill gaps: bubble (P - 1) x (F + I - W), P micro-batches in flight on each rank.
- `zbv` (Qi et al. 2024) has two stages a rank, which go to the last rank and come back: bubble (P - 1) x max(I, 2 I - 2 W) where I >= F;
  2 P of a rank's passes are in flight, as much as P of `zb_h1`.
- `dualpipe_v` (DeepSeek 2025) lies as `zbv` and overlaps forward with backward passes: bubble (P - 1) x (F&B + B - 3 W) where F = I;
  2 P + 1 are in flight.

Legend: P ranks, M micro-batches; F, B, I, W a stage's forward, backward, input's and weights' pass (B = I + W, W at most F and I), F&B a pair.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmspeed.config.parallel import FOLDED, ParallelConfig, ScheduleName
from mmspeed.errors import UserError

Kind = Literal["forward", "backward", "input", "weight"]


@dataclass(frozen=True)
class Action:
    """A pass of a micro-batch through a stage: `backward` is that for the input's gradient (`input`) and those of weights (`weight`) in one."""

    kind: Kind
    stage: int
    batch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """The passes of an action: this one."""
        return (self,)


@dataclass(frozen=True)
class Pair:
    """The forward pass of one micro-batch and the backward pass of another, to be overlapped."""

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        """The passes of a pair."""
        return self.forward, self.backward


Table = Sequence[Sequence[Action | Pair]]  # by rank


@dataclass(frozen=True)
class Pipeline:
    """How the stages of a model lie on ranks, and the order in which they compute.

    virtual: stages of a rank. more: forward passes before the first backward pass beyond those that the schedule needs.
    """

    ranks: int
    virtual: int = 1
    more: int = 0
    schedule: ScheduleName = "interleaved"

    @classmethod
    def of(cls, config: ParallelConfig) -> Pipeline:
        """The pipeline of a run; of one rank where it has none."""
        schedule: ScheduleName = "interleaved" if config.schedule == "auto" else config.schedule
        return cls(config.pp, config.virtual, int(config.extra_warmup), schedule)

    @property
    def stages(self) -> int:
        """All stages of the model."""
        return self.ranks * self.virtual

    @property
    def weights_wait(self) -> bool:
        """True where the gradients of weights are computed later than those of inputs."""
        return self.splits or self.overlaps

    @property
    def overlaps(self) -> bool:
        """True where the table has pairs."""
        return self.schedule in ("dualpipe_v", "overlap")

    @property
    def carries(self) -> bool:
        """True where the gradients of weights that a pass leaves behind its last exchange are computed in the first one of the next pass."""
        return self.overlaps and not self.splits

    @property
    def folded(self) -> bool:
        """True where stages go to the last rank and come back (V), so that the first rank also holds the last stage."""
        return self.schedule in FOLDED

    @property
    def splits(self) -> bool:
        """True where the gradients of weights have passes of their own."""
        return self.schedule in SPLIT

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return 2 * self.ranks - 1 - stage if self.folded and stage >= self.ranks else stage % self.ranks

    def own(self, rank: int) -> list[int]:
        """The stages of a rank, in the model's order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    @property
    def least(self) -> int:
        """The fewest micro-batches that fill the schedule: a step of fewer runs a shorter table over the same stages, and stands still for more of it."""
        return {"zb_h1": self.ranks, "zbv": 2 * self.ranks - 1, "dualpipe_v": 2 * self.ranks}.get(self.schedule, 1)

    def table(self, batches: int) -> list[list[Action | Pair]]:
        """The actions of each rank, in order, for a step of that many micro-batches."""
        if self.schedule not in SPLIT:
            return interleaved(self.ranks, self.virtual, batches, max(self.more, self.overlaps), pairs=self.overlaps)
        words, whole = SPLIT[self.schedule], max(batches, self.least)
        if batches < whole and self.schedule == "dualpipe_v":  # on the same stages, shorter, with no more in flight
            words, whole = SPLIT["zbv"], 2 * self.ranks - 1
        return [_spelled(words(self.ranks, rank, whole), self.own(rank), batches) for rank in range(self.ranks)]


def interleaved(
    ranks: int, virtual: int, batches: int, more: int = 0, pairs: bool = False
) -> list[list[Action | Pair]]:
    """The table of interleaved 1F1B, with `more` forward passes before the first backward than it needs.

    One more lets each forward overlap with a backward of another micro-batch, as in DualPipe, with half its weights: with `pairs` they are.
    """
    count = max(1, batches // ranks)
    sizes = [batches // count + (group < batches % count) for group in range(count)]
    ends = list(itertools.accumulate(sizes))
    groups = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    forward = [(chunk, batch) for group in groups for chunk in range(virtual) for batch in group]
    backward = [(virtual - 1 - chunk, batch) for chunk, batch in forward]
    table: list[list[Action | Pair]] = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank
        warm = min(len(forward), (2 * ahead + (virtual - 1) * sizes[0] if virtual > 1 else ahead) + more)
        forwards = [Action("forward", chunk * ranks + rank, batch) for chunk, batch in forward]
        backwards = [Action("backward", chunk * ranks + rank, batch) for chunk, batch in backward]
        both = list(zip(forwards[warm:], backwards, strict=False))
        steady = [Pair(*each) for each in both] if pairs else itertools.chain.from_iterable(both)
        table.append([*forwards[:warm], *steady, *backwards[len(forward) - warm :]])
    return table


def _zb_h1(ranks: int, rank: int, batches: int) -> str:
    """The row of ZB-H1: each rank puts off as many passes for weights as ranks are before it, so that all keep as much as the first of 1F1B."""
    ahead = ranks - 1 - rank
    return "F0 " * ahead + "F0 I0 " * rank + "F0 I0 W0 " * (batches - ranks + 1) + "I0 W0 " * ahead + "W0 " * rank


def _zbv(ranks: int, rank: int, batches: int) -> str:
    """The row of ZBV: while gradients come back from the last rank, a rank does input passes at once and those for weights afterwards."""
    ahead = ranks - 1 - rank
    return (
        "F0 " * (2 * ahead + 1)
        + "F1 F0 " * rank
        + "F1 I1 W1 " * (ahead + 1)
        + "F0 I0 W0 F1 I1 W1 " * (batches - ranks - ahead)
        + "I0 W0 F1 I1 W1 " * ahead
        + "I0 I1 " * rank
        + "I0 W0 " * (ahead + 1)
        + "W1 " * rank
        + "W0 " * rank
    )


def _dualpipe_v(ranks: int, rank: int, batches: int) -> str:
    """The row of DualPipeV. The last rank's first steady forward runs while the gradient for the backward after it comes, so they are no pair."""
    ahead = ranks - 1 - rank
    steady = "F0B1 F1B0 " * (batches - ranks - ahead)
    last = zip("B" * (rank + 1) + "I" * (rank + 1), "10" * (rank + 1), strict=True)
    return (
        "F0 " * (2 * ahead)
        + "F0 F1 " * (rank + 1)
        + "I1 W F1 " * ahead
        + (steady if ahead else steady.replace("F0B1", "F0 B1", 1))
        + "B1 F1B0 " * ahead
        + " ".join(map("".join, last))
        + " W I0" * ahead
        + " W" * (rank + 1)
    )


SPLIT = {
    "zb_h1": _zb_h1,
    "zbv": _zbv,
    "dualpipe_v": _dualpipe_v,
}  # those with passes for the gradients of weights alone


def _spelled(words: str, own: Sequence[int], batches: int) -> list[Action | Pair]:
    """The row of a rank in words, without micro-batches from `batches` on.

    F, B, I, W: the next forward, backward, input's and weights' pass; 0, 1: of which of its stages; W alone: the one that waits longest.
    """
    kinds: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    made: Counter[tuple[bool, int]] = Counter()
    waiting: list[tuple[int, int]] = []  # passes for weights: stage, micro-batch
    row: list[Action | Pair] = []
    for word in words.split():
        parts = []
        for letter, place in re.findall(r"([FBIW])([01]?)", word):
            if letter == "W":
                key = next(key for key in waiting if not place or key[0] == own[int(place)])
                waiting.remove(key)
            else:
                key = own[int(place)], made[letter == "F", own[int(place)]]
                made[letter == "F", key[0]] += 1
                waiting += [key] if letter == "I" else []
            parts += [Action(kinds[letter], *key)] if key[1] < batches else []
        row += [Pair(*parts)] if len(parts) == 2 else parts
    return row


def gives(action: Action) -> tuple[Action, ...]:
    """What is done with an action: a backward pass in one gives the gradients of input and weights."""
    if action.kind != "backward":
        return (action,)
    return Action("input", action.stage, action.batch), Action("weight", action.stage, action.batch)


def needs(entry: Action | Pair, pipeline: Pipeline) -> set[Action]:
    """What must be done before an entry of a table."""
    found = set()
    for action in entry.parts:
        stage, batch = action.stage, action.batch
        if action.kind == "weight":
            found.add(Action("input", stage, batch))
        elif action.kind == "forward":
            found |= {Action("forward", stage - 1, batch)} if stage else set()
        else:
            found |= {Action("input", stage + 1, batch)} if stage + 1 < pipeline.stages else set()
            found.add(Action("forward", stage, batch))
    return found


def check_stages(blocks: int, pipeline: Pipeline) -> None:
    """Raise UserError for more stages than blocks."""
    ranks, virtual = pipeline.ranks, pipeline.virtual
    if pipeline.stages > blocks:
        fits = {"virtual": 0 if pipeline.folded else blocks // ranks, "pp": blocks // virtual}
        words = (
            " or ".join(f"parallel.{key} {most}" for key, most in fits.items() if most >= (key == "pp") + 1)
            or "no pipeline"
        )
        raise UserError(
            f"parallel.pp {ranks} x parallel.virtual {virtual} makes {pipeline.stages} stages, and the model has {blocks} blocks: each "
            f"stage needs one, so use {words}"
        )


def given_bounds(sizes: Sequence[int], blocks: int) -> list[range]:
    """The blocks of stages of these sizes. Raises UserError for another number of blocks in all than the model's."""
    if over := sum(sizes) - blocks:
        near, most = list(sizes), max(range(len(sizes)), key=sizes.__getitem__)
        near[most] -= over
        hint = near if near[most] > 0 else [len(part) for part in stage_bounds([1.0] * blocks, Pipeline(len(sizes)))]
        raise UserError(
            f"parallel.stages {list(sizes)} are {sum(sizes)} blocks, and the model has {blocks}: write for example {hint}"
        )
    return _ranges(sizes)


def stage_bounds(work: Sequence[float], pipeline: Pipeline, before: float = 0.0, after: float = 0.0) -> list[range]:
    """The blocks of each stage, by the work of each block, of what comes before the first and behind the last.

    The rank with most work has as little as it can, then the one with second most, and so on; so do stages. Of equal divisions that with
    larger stages first. Work counts in twentieths of the largest block's, so that ends of little work change nothing.
    Exact for one stage a rank; of several, blocks are moved from the division whose stages are best, as long as that helps ranks.
    """
    unit = max(work) / 20 or 1.0
    ends = [round(before / unit), *itertools.repeat(0, pipeline.stages - 2), round(after / unit)]
    ends = ends if pipeline.stages > 1 else [round((before + after) / unit)]
    until = [0, *itertools.accumulate(round(each / unit) for each in work)]

    def loads(sizes: Sequence[int]) -> list[int]:
        return [until[part.stop] - until[part.start] + end for part, end in zip(_ranges(sizes), ends, strict=True)]

    # (loads of the stages so far, largest first; their negative sizes), by the blocks that they have: adding a stage keeps the order
    best: dict[int, tuple[list[int], list[int]]] = {0: ([], [])}
    for end in ends:
        longer: dict[int, tuple[list[int], list[int]]] = {}
        for start, (known, sizes) in best.items():
            for stop in range(start + 1, len(work) + 1):
                load = until[stop] - until[start] + end
                if stop in longer and load > longer[stop][0][0]:
                    continue
                found = sorted([*known, load], reverse=True), [*sizes, start - stop]
                longer[stop] = min(longer.get(stop, found), found)
        best = longer
    sizes = [-size for size in best[len(work)][1]]

    def order(sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        of_stages = loads(sizes)
        ranks = [sum(of_stages[stage] for stage in pipeline.own(rank)) for rank in range(pipeline.ranks)]
        return sorted(ranks, reverse=True), sorted(of_stages, reverse=True), [-size for size in sizes]

    while pipeline.virtual > 1:
        moves = [
            [size - (stage == giver) + (stage == taker) for stage, size in enumerate(sizes)]
            for giver, taker in itertools.permutations(range(pipeline.stages), 2)
            if sizes[giver] > 1
        ]
        better = min([sizes, *moves], key=order)
        if better == sizes:
            break
        sizes = better
    return _ranges(sizes)


def _ranges(sizes: Sequence[int]) -> list[range]:
    """Ranges of these lengths, one behind the other."""
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
