"""Schedules of a pipeline as tables: the actions of each rank in order. The table that runs is the table that is simulated.

A rank holds `virtual` stages, every P-th of them (interleaved: Narayanan et al. 2021); with one stage each it is 1F1B (PipeDream-Flush).
Micro-batches come in groups as even as they can be, larger first: so any number of them keeps the bubble (P - 1) x (F + B) / virtual.

Legend: P ranks, M micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError

Kind = Literal["forward", "backward", "input", "weight"]
ScheduleName = Literal["1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v", "overlap"]
SPLIT = ("zb_h1", "zbv", "dualpipe_v")  # schedules with passes for the gradients of weights alone


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
        return cls(config.pp, config.virtual, int(config.extra_warmup or schedule == "overlap"), schedule)

    @property
    def stages(self) -> int:
        """All stages of the model."""
        return self.ranks * self.virtual

    @property
    def overlaps(self) -> bool:
        """True where the table has pairs."""
        return self.schedule in ("dualpipe_v", "overlap")

    @property
    def folded(self) -> bool:
        """True where stages go to the last rank and come back (V), so that the first rank also holds the last stage."""
        return self.schedule in ("zbv", "dualpipe_v")

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

    def table(self, batches: int) -> list[list[Action | Pair]]:
        """The actions of each rank, in order, for a step of that many micro-batches."""
        if self.schedule in SPLIT:
            raise UserError(f"parallel.schedule {self.schedule} is not there yet")
        return interleaved(self.ranks, self.virtual, batches, self.more, pairs=self.schedule == "overlap")


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


def forward_only(ranks: int, virtual: int, batches: int) -> list[list[Action]]:
    """The table of forward passes alone, as in validation."""
    return [
        [Action("forward", chunk * ranks + rank, batch) for batch in range(batches) for chunk in range(virtual)]
        for rank in range(ranks)
    ]


def check_table(table: Table, pipeline: Pipeline, batches: int, trains: bool = True) -> None:
    """Raise ValueError for a table that lacks or repeats a pass, or in which ranks wait for one another for ever, whatever they take."""
    kinds: tuple[Kind, ...] = ("forward", "input", "weight") if trains else ("forward",)
    wanted = {
        Action(kind, stage, batch) for kind in kinds for stage in range(pipeline.stages) for batch in range(batches)
    }
    rows = [[part for entry in row for part in entry.parts] for row in table]
    got = [done for row in rows for part in row for done in gives(part)]
    if len(got) != len(wanted) or set(got) != wanted:
        raise ValueError(f"the table has {len(got)} passes, not {len(wanted)}: each pass of each micro-batch once")
    for rank, row in enumerate(rows):
        for part in row:
            if pipeline.rank_of(part.stage) != rank:
                raise ValueError(f"rank {rank} does not hold stage {part.stage}")
    done: set[Action] = set()
    at = [0] * len(table)
    while len(done) < len(got):
        going = [rank for rank, row in enumerate(table) if at[rank] < len(row)]
        ready = [rank for rank in going if needs(table[rank][at[rank]], pipeline) <= done]
        if not ready:
            raise ValueError(f"ranks wait for one another at {[table[rank][at[rank]] for rank in going]}")
        for rank in ready:
            done.update(each for part in table[rank][at[rank]].parts for each in gives(part))
            at[rank] += 1


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


def stage_bounds(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, as even as they can be, larger first."""
    sizes = [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
