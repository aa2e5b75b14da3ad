"""A rank's share of a step: its micro-batches, with the weights that make each draw count once over all ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mmspeed.protocols import OrderedSample, ShapeClass

from .assignment import Assignment, BucketBatch, StepLoad, assign_by_share, assign_slots, assignment_load
from .order import Batching
from .sampler import S, SampleUse


def count_present(draws: Sequence[SampleUse[OrderedSample]]) -> int:
    """The number of draws of a step that are not lost or left out, over which its loss is averaged."""
    return sum(not draw.lost for draw in draws)


def rank_batches(
    draws: Sequence[SampleUse[S]], batching: Batching, rank: int, world: int
) -> list[list[tuple[SampleUse[S], float]]]:
    """A rank's part of one step, cut into micro-batches of (draw, weight), each of one bucket.

    Every rank gets the same number of micro-batches, and none is empty: a rank without remaining draws repeats one of
    the cheapest bucket with weight 0, so that all ranks take part in every collective. Over all ranks the weights of each draw
    sum to 1, except that a draw of a lost sample is replaced by a present one with weight 0. The ranks of a group have the same
    videos, with weight 1 / group each; images belong to single ranks, or to tensor-parallel ranks together.

    Raises ValueError for an empty step, a step of lost samples only, or a rank outside the world.
    """
    if not draws or not 0 <= rank < world or world % batching.group:
        raise ValueError(
            f"no micro-batches of {len(draws)} draws for rank {rank} of {world}, groups of {batching.group}"
        )
    micro_batches = []
    assigned = list(_assigned(draws, batching, world))
    fillers = [_filler(lots, batching) for lots, _, _ in assigned]
    any_filler = next((filler for filler in fillers if filler is not None), None)
    if any_filler is None:
        raise ValueError("every draw of this step is lost")
    for (lots, rows, ranks), filler in zip(assigned, fillers, strict=True):
        for row in rows:
            cell = row[rank // ranks]
            cell_draws = [] if cell is None else lots[cell.lot][cell.start : cell.stop]
            present = [draw for draw in cell_draws if not draw.lost]
            if present:
                micro_batches.append([(present[0], 0.0) if draw.lost else (draw, 1.0 / ranks) for draw in cell_draws])
            else:
                micro_batches.append([(filler or any_filler, 0.0)])
    return micro_batches


def ranks_of_samples(
    draws: Sequence[SampleUse[S]], batching: Batching, world: int
) -> list[tuple[SampleUse[S], tuple[int, ...]]]:
    """Each draw of a step, with the ranks that compute it."""
    return [
        (draw, tuple(range(lane * ranks, (lane + 1) * ranks)))
        for lots, rows, ranks in _assigned(draws, batching, world)
        for row in rows
        for lane, cell in enumerate(row)
        if cell is not None
        for draw in lots[cell.lot][cell.start : cell.stop]
    ]


def imbalance(draws: Sequence[SampleUse[OrderedSample]], batching: Batching, world: int) -> float:
    """Greatest over mean cost across ranks of one step, if ranks synchronise in every micro-batch; at best 1."""
    if batching.share is not None:
        loads = [load for *_, load in _by_share(draws, batching, batching.share, world)]
        return sum(load.slowest for load in loads) / sum(load.mean for load in loads)
    counts = Counter(draw.sample.bucket for draw in draws)
    return step_load(sorted(counts.items()), batching, world).imbalance


def step_load(pieces: Sequence[tuple[ShapeClass, int]], batching: Batching, world: int) -> StepLoad:
    """Load of a step with these numbers of samples of each bucket; kinds of lanes run one after another. `idle` counts ranks."""
    slowest = busiest = mean = 0.0
    rows = idle = 0
    for part, ranks in dp_groups_of(pieces, batching):
        load = assignment_load(bucket_batches_of(part, batching), world // ranks)
        slowest, busiest, mean = slowest + load.slowest, busiest + load.busiest, mean + load.mean
        rows, idle = rows + load.rows, idle + load.idle * ranks
    return StepLoad(slowest, busiest, mean, rows, idle)


def bucket_batches_of(pieces: Sequence[tuple[ShapeClass, int]], batching: Batching) -> tuple[BucketBatch, ...]:
    """The numbers of samples of each bucket, in the form that assignment takes."""
    return tuple(
        BucketBatch(count, batching.dp_group_cost(bucket), batching.at_a_time(bucket)) for bucket, count in pieces
    )


def dp_groups_of(
    pieces: Sequence[tuple[ShapeClass, int]], batching: Batching
) -> list[tuple[list[tuple[ShapeClass, int]], int]]:
    """The pieces of a step that are assigned together, with the number of ranks in a lane.

    Under sequence parallelism videos and images are assigned separately: in a row all ranks exchange, or none does. Otherwise the
    same ranks compute both.
    """
    if batching.group == batching.tensor:
        return [(list(pieces), batching.group)]
    videos = [piece for piece in pieces if piece[0].splits]
    images = [piece for piece in pieces if not piece[0].splits]
    return [(part, ranks) for part, ranks in ((videos, batching.group), (images, batching.tensor)) if part]


def _assigned(
    draws: Sequence[SampleUse[S]], batching: Batching, world: int
) -> Iterator[tuple[list[list[SampleUse[S]]], Assignment, int]]:
    """Yield for each kind of lanes the draws of each lot, the cells, and the number of ranks in a lane."""
    if batching.share is not None:
        for lots, rows, ranks, _ in _by_share(draws, batching, batching.share, world):
            yield lots, rows, ranks
        return
    by_bucket = _by_bucket(draws)
    for pieces, ranks in dp_groups_of([(b, len(group)) for b, group in by_bucket.items()], batching):
        yield (
            [by_bucket[bucket] for bucket, _ in pieces],
            assign_slots(bucket_batches_of(pieces, batching), world // ranks),
            ranks,
        )


def _by_share(
    draws: Sequence[SampleUse[S]], batching: Batching, share: Callable[[OrderedSample], float], world: int
) -> Iterator[tuple[list[list[SampleUse[S]]], Assignment, int, StepLoad]]:
    """Yield like `_assigned`, by the cost of each sample, with the load: a lot's draws are in the order in which cells count."""
    by_bucket = _by_bucket(draws)
    for pieces, ranks in dp_groups_of([(b, len(group)) for b, group in by_bucket.items()], batching):
        lots = [by_bucket[bucket] for bucket, _ in pieces]
        shares = [[share(draw.sample) for draw in lot] for lot in lots]
        orders, rows, load = assign_by_share(bucket_batches_of(pieces, batching), shares, world // ranks)
        ordered = [[lot[place] for place in order] for lot, order in zip(lots, orders, strict=True)]
        yield ordered, rows, ranks, load


def _by_bucket(draws: Sequence[SampleUse[S]]) -> dict[ShapeClass, list[SampleUse[S]]]:
    return {bucket: list(group) for bucket, group in itertools.groupby(draws, key=lambda draw: draw.sample.bucket)}


def _filler(lots: Sequence[Sequence[SampleUse[S]]], batching: Batching) -> SampleUse[S] | None:
    """A present draw of the cheapest of the buckets that are assigned together; a row is of videos or of images on all ranks.

    If samples have individual costs, it is the cheapest of its bucket.
    """
    share = batching.share
    present = [[draw for draw in lot if not draw.lost] for lot in lots]
    cheapest = [lot[0] if share is None else min(lot, key=lambda draw: share(draw.sample)) for lot in present if lot]
    return min(cheapest, key=lambda draw: batching.cost(draw.sample.bucket).of(1), default=None)
