"""Steps of pipelines, simulated: closed forms exactly, what is in flight, messages, and the picture."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from mmspeed.plan.schedules import Action, Pipeline, ScheduleName
from mmspeed.plan.simulate import Simulated, picture, reckoned, simulate
from tests.support.schedules import check_table

SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2), ("overlap", 2), ("overlap", 3),
)  # fmt: skip


def timed(pipeline: Pipeline, batches: int, forward: int, inputs: int, weights: int, pair: int) -> Simulated:
    """A step of equal stages, whose passes take so long."""
    table = pipeline.table(batches)
    check_table(table, pipeline, batches)
    times = {"forward": forward, "input": inputs, "weight": weights, "backward": inputs + weights}
    return simulate(table, pipeline, lambda action: times[action.kind], pair=lambda _: pair)


def keeps_its_closed_form(pipeline: Pipeline, batches: int, draw: random.Random) -> None:
    """Assert the bubble and what is in flight of a step that fills its schedule, for drawn durations."""
    ranks, schedule = pipeline.ranks, pipeline.schedule
    forward = draw.randint(1, 20)
    inputs = {"zbv": forward + draw.randint(0, 9), "dualpipe_v": forward}.get(schedule, draw.randint(1, 20))
    weights = draw.randint(1, min(forward, inputs))
    backward = inputs + weights
    pair = draw.randint(max(forward, backward), forward + backward)
    step = timed(pipeline, batches, forward, inputs, weights, pair)
    bubble, flying = {
        "1f1b": (forward + backward, tuple(range(ranks, 0, -1))),
        "interleaved": (forward + backward, None),
        "overlap": (forward + backward, None),
        "zb_h1": (forward + backward - 2 * weights, (ranks,) * ranks),
        "zbv": (max(inputs, 2 * inputs - 2 * weights), (2 * ranks,) * ranks),
        "dualpipe_v": (pair + backward - 3 * weights, None),
    }[schedule]
    case = pipeline, batches, forward, inputs, weights, pair
    assert max(step.waits) == (ranks - 1) * bubble, case  # of a stage, of which a rank's passes have `virtual`
    assert step.bubble == max(step.waits) or pipeline.overlaps, case  # the first ranks have fewer pairs
    assert step.in_flight == flying or flying is None, case
    assert max(step.in_flight) == 2 * ranks + 1 or schedule != "dualpipe_v" or ranks == 1, case


def cases(ranks: Sequence[int]) -> Iterator[tuple[Pipeline, range]]:
    """Each schedule, with the numbers of micro-batches of the closed form up to 64."""
    for count in ranks:
        for schedule, virtual in SCHEDULES:
            pipeline = Pipeline(count, virtual, int(schedule == "overlap"), schedule)
            yield pipeline, range(max(pipeline.least, count), 65)


def test_closed_forms() -> None:
    draw = random.Random(0)
    for pipeline, numbers in cases((1, 2, 3, 4, 7, 16)):
        for batches in {numbers[0], min(64, numbers[0] + draw.randint(1, 2 * pipeline.ranks))}:
            keeps_its_closed_form(pipeline, batches, draw)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 17))
def test_all_closed_forms(ranks: int) -> None:
    draw = random.Random(ranks)
    for pipeline, numbers in cases([ranks]):
        for batches in numbers:
            keeps_its_closed_form(pipeline, batches, draw)


@pytest.mark.parametrize("more, expected", [(0, (11, 9, 7, 5)), (1, (12, 10, 8, 6))])
def test_micro_batches_in_flight(more: int, expected: tuple[int, ...]) -> None:
    step = reckoned(Pipeline(4, 2, more), 8)
    assert step.in_flight == expected
    table = Pipeline(4, 2, more).table(8)
    kept = simulate(table, Pipeline(4, 2), lambda _: 1.0, kept=lambda action: 10.0 if action.kind == "forward" else 0.0)
    assert kept.kept == tuple(10.0 * each for each in expected)


def test_fewer_micro_batches_than_fill_a_schedule_run_over_the_same_stages() -> None:
    for ranks in (2, 3, 5):
        for schedule, virtual in SCHEDULES:
            pipeline = Pipeline(ranks, virtual, int(schedule == "overlap"), schedule)
            for batches in range(1, pipeline.least):
                step = timed(pipeline, batches, 1, 1, 1, 3)
                whole = timed(pipeline, pipeline.least, 1, 1, 1, 3)
                assert all(map(int.__le__, step.in_flight, whole.in_flight)), (pipeline, batches)
                assert step.step < 3 * virtual * (batches + ranks - 1), (pipeline, batches)  # 1F1B of whole ranks


def test_messages_of_a_rank_follow_one_another() -> None:
    step = simulate(
        Pipeline(2).table(2), Pipeline(2), lambda _: 1.0, lambda action: 3.0 if action.kind == "forward" else 0.0
    )
    assert [begin for entry, begin, _ in step.spans[1] if entry.parts[0].kind == "forward"] == [4.0, 7.0]
    with pytest.raises(ValueError, match="wait for one another"):
        simulate([[Action("forward", 1, 0)], []], Pipeline(1, 2), lambda _: 1.0)


def test_the_picture_of_a_step() -> None:
    assert picture(reckoned(Pipeline(2), 2)) == ["  0 01..aa.bb", "  1 .0aa1bb.."]
    assert picture(reckoned(Pipeline(2, schedule="zb_h1"), 2)) == ["  0 01.aAbB", "  1 .0a1bAB"]
