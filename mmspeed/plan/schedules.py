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

from mmspeed.errors import UserError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Action:
    """The forward or backward pass of a micro-batch through a stage."""

    kind: Kind
    stage: int
    batch: int


Table = Sequence[Sequence[Action]]  # by rank


def rank_of(stage: int, ranks: int) -> int:
    """The rank that holds a stage."""
    return stage % ranks


def interleaved(ranks: int, virtual: int, batches: int, more: int = 0) -> list[list[Action]]:
    """The table of interleaved 1F1B, with `more` forward passes before the first backward than it needs.

    One more lets each forward overlap with a backward of another micro-batch, as in DualPipe, with half its weights.
    """
    count = max(1, batches // ranks)
    sizes = [batches // count + (group < batches % count) for group in range(count)]
    ends = list(itertools.accumulate(sizes))
    groups = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    forward = [(chunk, batch) for group in groups for chunk in range(virtual) for batch in group]
    backward = [(virtual - 1 - chunk, batch) for chunk, batch in forward]
    table = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank
        warm = min(len(forward), (2 * ahead + (virtual - 1) * sizes[0] if virtual > 1 else ahead) + more)
        forwards = [Action("forward", chunk * ranks + rank, batch) for chunk, batch in forward]
        backwards = [Action("backward", chunk * ranks + rank, batch) for chunk, batch in backward]
        steady = itertools.chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
        table.append([*forwards[:warm], *steady, *backwards[len(forward) - warm :]])
    return table


def forward_only(ranks: int, virtual: int, batches: int) -> list[list[Action]]:
    """The table of forward passes alone, as in validation."""
    return [
        [Action("forward", chunk * ranks + rank, batch) for batch in range(batches) for chunk in range(virtual)]
        for rank in range(ranks)
    ]


def check_table(table: Table, stages: int, batches: int, trains: bool = True) -> None:
    """Raise ValueError for a table that lacks or repeats an action, or in which ranks wait for one another for ever, whatever they take."""
    ranks = len(table)
    kinds: tuple[Kind, ...] = ("forward", "backward") if trains else ("forward",)
    wanted = {Action(kind, stage, batch) for kind in kinds for stage in range(stages) for batch in range(batches)}
    got = [action for row in table for action in row]
    if len(got) != len(wanted) or set(got) != wanted:
        raise ValueError(f"the table has {len(got)} actions, not {len(wanted)}: each pass of each micro-batch once")
    for rank, row in enumerate(table):
        for action in row:
            if rank_of(action.stage, ranks) != rank:
                raise ValueError(f"rank {rank} does not hold stage {action.stage}")
    done: set[Action] = set()
    at = [0] * ranks
    while sum(at) < len(got):
        ready = [
            rank
            for rank in range(ranks)
            if at[rank] < len(table[rank]) and needs(table[rank][at[rank]], stages) <= done
        ]
        if not ready:
            stuck = [table[rank][at[rank]] for rank in range(ranks) if at[rank] < len(table[rank])]
            raise ValueError(f"ranks wait for one another at {stuck}")
        for rank in ready:
            done.add(table[rank][at[rank]])
            at[rank] += 1


def needs(action: Action, stages: int) -> set[Action]:
    """The actions that must be done before one."""
    stage, batch = action.stage, action.batch
    if action.kind == "forward":
        return {Action("forward", stage - 1, batch)} if stage else set()
    after = {Action("backward", stage + 1, batch)} if stage + 1 < stages else set()
    return {Action("forward", stage, batch), *after}


def check_stages(blocks: int, ranks: int, virtual: int) -> None:
    """Raise UserError for more stages than blocks."""
    if ranks * virtual > blocks:
        raise UserError(
            f"parallel.pp {ranks} x parallel.virtual {virtual} makes {ranks * virtual} stages, and the model has {blocks} blocks: each "
            f"stage needs one, so use at most {blocks} together"
        )


def stage_bounds(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, as even as they can be, larger first."""
    sizes = [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
