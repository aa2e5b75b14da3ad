"""Blocks divided over the stages of a pipeline: by work, where the largest stage is the smallest that can be, or as they are given."""

from __future__ import annotations

import itertools
import random

import pytest

from mmspeed.errors import UserError
from mmspeed.plan.schedules import Pipeline, given_bounds, stage_bounds


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
