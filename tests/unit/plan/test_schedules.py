"""Tables of pipelines: they have every pass once, end whatever passes take, keep their closed forms, and are those of torch where it has any."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from mmspeed.errors import UserError
from mmspeed.plan.schedules import Action, Pipeline, check_table, forward_only, given_bounds, interleaved, stage_bounds
from mmspeed.plan.simulate import picture, reckoned, simulate


def test_any_number_of_micro_batches_keeps_the_closed_form() -> None:
    for ranks in range(1, 17):
        for virtual in range(1, 5):
            for batches in sorted({1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 64}):
                pipeline = Pipeline(ranks, virtual)
                check_table(pipeline.table(batches), pipeline, batches)
                if batches >= ranks:  # in units of a stage's forward pass, of which a rank's has `virtual`
                    assert reckoned(pipeline, batches).bubble == (ranks - 1) * 3, (ranks, virtual, batches)


@pytest.mark.parametrize("more, expected", [(0, (11, 9, 7, 5)), (1, (12, 10, 8, 6))])
def test_micro_batches_in_flight(more: int, expected: tuple[int, ...]) -> None:
    assert reckoned(Pipeline(4, 2, more), 8).in_flight == expected
    assert reckoned(Pipeline(4), 8).in_flight == (4, 3, 2, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_one_more_warm_up_no_neighbours_depend_on_each_other(ranks: int) -> None:
    def dependent(more: int) -> int:
        pairs = [pair for row in interleaved(ranks, 2, 8, more) for pair in itertools.pairwise(row)]
        return sum(Action("backward", a.stage, a.batch) == b for a, b in pairs if a.kind == "forward")

    assert dependent(0) == 8 and dependent(1) == 0


@pytest.mark.parametrize("ranks, batches", [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_table_is_torchs_action_by_action(ranks: int, batches: int) -> None:
    for rank, row in enumerate(interleaved(ranks, 2, batches)):
        schedule = SimpleNamespace(
            pp_group_size=ranks, _n_microbatches=batches, n_local_stages=2, number_of_rounds=batches // ranks,
            microbatches_per_round=ranks, _num_stages=2 * ranks, rank=rank,
        )  # fmt: skip
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)  # type: ignore[arg-type]
        found = [
            ("forward" if one.computation_type.name == "FORWARD" else "backward", one.stage_index, one.microbatch_index)
            for one in theirs
            if one is not None
        ]
        assert found == [(one.kind, one.stage, one.batch) for one in row]


def test_random_durations_and_messages_never_lock() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        ranks, virtual, batches = draw.randint(1, 8), draw.randint(1, 4), draw.randint(1, 24)
        pipeline = Pipeline(ranks, virtual, draw.randint(0, 1))
        table = pipeline.table(batches)
        check_table(table, pipeline, batches)
        lengths = {action: draw.random() for row in table for action in row}
        step = simulate(table, pipeline, lengths.__getitem__, draw.random())
        assert [[action for action, _, _ in row] for row in step.spans] == table
        assert step.step >= max(sum(lengths[action] for action in row) for row in table)
    check_table(forward_only(3, 2, 5), Pipeline(3, 2), 5, trains=False)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda table: table[0].pop(), "has 22 passes, not 24"),
        (lambda table: table[0].append(table[1].pop()), "does not hold stage"),
        (lambda table: table[1].reverse(), "wait for one another"),
    ],
)
def test_a_wrong_table_is_refused(change: object, words: str) -> None:
    table = interleaved(2, 1, 4)
    change(table)  # type: ignore[operator]
    with pytest.raises(ValueError, match=words):
        check_table(table, Pipeline(2), 4)


def test_the_picture_of_a_step() -> None:
    assert picture(reckoned(Pipeline(2), 2)) == ["  0 01..aa.bb", "  1 .0aa1bb.."]


@pytest.mark.parametrize(
    "work, pipeline, ends, expected",
    [
        ([1.0] * 7, Pipeline(3), (0.0, 0.0), [3, 2, 2]),
        ([1.0] * 7, Pipeline(3), (0.02, 0.02), [3, 2, 2]),  # ends of little work change nothing
        ([1.0] * 8, Pipeline(4), (0.0, 2.0), [3, 2, 2, 1]),  # a head worth two blocks
        ([1.0, 1.0, 1.0, 3.0, 3.0, 3.0], Pipeline(2), (0.0, 0.0), [4, 2]),  # dense blocks, then those with experts
        ([1.0] * 7, Pipeline(2, 2), (0.0, 1.0), [2, 2, 2, 1]),
        ([1.0] * 8, Pipeline(2, 2, schedule="zbv"), (0.0, 2.0), [2, 3, 2, 1]),  # the first rank has the last stage
        ([2.0] * 3, Pipeline(1), (1.0, 1.0), [3]),
    ],
)
def test_stages_are_divided_by_work(
    work: list[float], pipeline: Pipeline, ends: tuple[float, float], expected: list[int]
) -> None:
    assert [len(part) for part in stage_bounds(work, pipeline, *ends)] == expected


def test_no_division_has_a_smaller_largest_stage() -> None:
    draw = random.Random(0)
    for _ in range(100):
        blocks, ranks = draw.randint(4, 10), draw.randint(2, 4)
        work, head = [20.0, *(float(draw.randint(1, 20)) for _ in range(blocks - 1))], float(draw.randint(0, 60))

        def largest(parts: list[range]) -> float:
            return max(sum(work[place] for place in part) + head * (part.stop == len(work)) for part in parts)  # noqa: B023

        cuts = itertools.combinations(range(1, blocks), ranks - 1)
        every = [list(itertools.starmap(range, itertools.pairwise((0, *cut, blocks)))) for cut in cuts]
        assert largest(stage_bounds(work, Pipeline(ranks), after=head)) == min(map(largest, every))


@pytest.mark.parametrize(
    "sizes, hint", [([1, 2], r"model has 4: write for example \[1, 3\]"), ([1, 9], r"\[2, 2\]|\[1, 3\]")]
)
def test_given_stages_have_the_blocks_of_the_model(sizes: list[int], hint: str) -> None:
    assert given_bounds([1, 3], 4) == [range(1), range(1, 4)]
    with pytest.raises(UserError, match=hint):
        given_bounds(sizes, 4)
