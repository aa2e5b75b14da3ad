"""The dealing of items follows the table of axes, for every layout of a config."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed import axes
from mmspeed.axes import AxisSizes, MeshTable, mesh_table
from mmspeed.config.parallel import AXES, ParallelConfig
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data import BatchSampler, Sample, SampleUse
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching
from mmspeed.data.sampling.rank_batches import rank_batches
from tests.unit.data.test_sampler import BUCKETS, make_samples

IMAGE, VIDEO = BUCKETS[:2]
COSTS = SampleCosts(lambda bucket: bucket.numbers, lambda bucket: float(bucket.numbers))


Share = list[list[tuple[SampleUse[Sample], float]]]


def dealt(parallel: ParallelConfig, world: int, videos: bool) -> list[Share]:
    """The images or videos that each rank computes of a step that has some for every rank."""
    batching = make_batching(
        BatchingConfig(), TrainConfig(batch_size=2 * world), [IMAGE, VIDEO], COSTS, world, parallel
    )
    counts = (0, 2 * world) if videos else (2 * world, 0)
    draws = BatchSampler(make_samples(*counts), batching, seed=0).draws(0)
    assert len(draws) == 2 * world
    return [rank_batches(draws, batching, rank, world) for rank in range(world)]


def keys(share: Share) -> frozenset[str]:
    """The items of a rank's share, fillers left out."""
    return frozenset(draw.sample.key for micro in share for draw, weight in micro if weight)


OF_STAGE = [axis for axis in AXES if axis not in axes.STAGES]  # every stage reads what the first does


def read(table: MeshTable, split: bool) -> list[int]:
    """The share of the items that each rank reads, by the table."""
    return [table.reader(rank, split).index for rank in range(table.world)]


def same(things: list[frozenset[str]] | list[int]) -> list[list[bool]]:
    """The pairs of ranks that have the same value."""
    return [[one == other for other in things] for one in things]


@given(st.fixed_dictionaries({axis: st.integers(1, 3) for axis in OF_STAGE}), st.data())
def test_a_config_counts_as_the_table_does(sizes: dict[str, int], data: st.DataObject) -> None:
    parallel = ParallelConfig(**sizes)  # type: ignore[arg-type]
    table = mesh_table(math.prod(sizes.values()), AxisSizes(**parallel.sizes()))
    rank = data.draw(st.integers(0, table.world - 1))
    for split in (True, False):
        reader, stage = table.reader(rank, split), table.in_stage(rank)
        peers = [other for other in range(table.world) if table.reader(other, split) == reader]
        assert len(peers) == parallel.together(split) == stage.count // reader.count
        first = peers[0]  # they follow one another, which the dealing of items goes by
        assert peers == list(range(first, first + len(peers)))
        assert reader.index == stage.index // parallel.together(split)
    assert parallel.group == parallel.together(split=True) == parallel.sequence * parallel.together(split=False)
    speaking = [table.first_of_group(other) for other in range(table.world)]
    assert sum(speaking) * parallel.group == table.world
    parallel.check_world(table.world)


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({axis: st.integers(1, 2) for axis in OF_STAGE}), st.booleans())
def test_ranks_meet_the_same_items_where_the_table_says_so(sizes: dict[str, int], videos: bool) -> None:
    parallel, world = ParallelConfig(**sizes), math.prod(sizes.values())  # type: ignore[arg-type]
    table = mesh_table(world, AxisSizes(**parallel.sizes()))
    shares = dealt(parallel, world, videos)
    assert same([keys(share) for share in shares]) == same(read(table, split=videos))


def test_every_axis_of_the_dense_view_says_what_its_ranks_read() -> None:
    rows = (*axes.STAGES, *axes.ITEMS, *axes.TOKENS, *axes.TOGETHER)
    assert rows == axes.DENSE and len(set(rows)) == len(rows)
    assert set(axes.DENSE) <= set(AxisSizes.__dataclass_fields__)
