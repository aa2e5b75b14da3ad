"""What every table of a pipeline must be."""

from __future__ import annotations

import itertools

from mmspeed.plan.schedules import Action, Kind, Pipeline, Table, gives, needs


def check_table(table: Table, pipeline: Pipeline, batches: int) -> tuple[int, ...]:
    """The most stages' passes in flight on each rank. Raises ValueError for a table that lacks or repeats a pass, or in which ranks wait for one another for ever, whatever they take."""
    kinds: tuple[Kind, ...] = ("forward", "input", "weight")
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
    counts = [[{"forward": 1, "weight": -1}.get(each.kind, 0) for part in row for each in gives(part)] for row in rows]
    return tuple(max(itertools.accumulate(row)) for row in counts)
