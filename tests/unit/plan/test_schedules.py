"""Tables of pipelines: they have every pass once, end whatever passes take, and are those of torch where it has any."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torch.distributed.pipelining import schedules as torchs

from mmspeed.plan.schedules import Action, Pair, Pipeline, ScheduleName, Table, interleaved
from mmspeed.plan.simulate import simulate
from tests.support.schedules import check_table

TORCHS = {
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb_h1": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipe_v": torchs.ScheduleDualPipeV,
}


@pytest.mark.parametrize("schedule", TORCHS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_table_is_torchs_action_by_action(schedule: ScheduleName, ranks: int) -> None:
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}

    def ours(action: Any) -> Any:
        if action.sub_actions:
            return Pair(*map(ours, action.sub_actions))
        return Action(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)  # type: ignore[arg-type]

    virtual = 1 if schedule == "zb_h1" else 2
    pipeline = Pipeline(ranks, virtual, schedule=schedule)
    for batches in (4 * ranks, 3 * ranks) if schedule == "interleaved" else (*range(pipeline.least, 3 * ranks + 2), 1):
        for rank, row in enumerate(pipeline.table(batches)):
            self = SimpleNamespace(
                pp_group_size=ranks, _n_microbatches=batches, n_local_stages=virtual, number_of_rounds=batches // ranks,
                microbatches_per_round=ranks, _num_stages=virtual * ranks, num_stages=virtual * ranks, rank=rank,
            )  # fmt: skip
            theirs: Any = TORCHS[schedule]._calculate_single_rank_operations
            if batches >= pipeline.least or schedule == "zbv":  # torch's others refuse, or take other numbers of rounds
                assert row == [ours(action) for action in theirs(self, rank) if action], (batches, rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_one_more_warm_up_no_neighbours_depend_on_each_other(ranks: int) -> None:
    def dependent(more: int) -> int:
        pairs = [pair for row in interleaved(ranks, 2, 8, more) for pair in itertools.pairwise(row)]
        return sum(Action("backward", a.stage, a.batch) == b for a, b in pairs if a.kind == "forward")

    assert dependent(0) == 8 and dependent(1) == 0


def drawn(draw: random.Random) -> tuple[Pipeline, int]:
    """A pipeline of any schedule, and any number of micro-batches."""
    schedule = draw.choice(get_args(ScheduleName))
    virtual = {"1f1b": 1, "zb_h1": 1, "interleaved": draw.randint(2, 4), "overlap": draw.randint(2, 4)}.get(schedule, 2)
    more = {"1f1b": draw.randint(0, 1), "interleaved": draw.randint(0, 1), "overlap": 1}.get(schedule, 0)
    return Pipeline(draw.randint(1, 5), virtual, more, schedule), draw.randint(1, 9)


def accepts(check: Any) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


def test_random_steps_never_lock_and_the_check_agrees_with_the_simulator() -> None:
    draw, refused = random.Random(0), 0
    for _ in range(1000):
        pipeline, batches = drawn(draw)
        table: list[list[Action | Pair]] = pipeline.table(batches)
        lengths = {part: draw.random() for row in table for entry in row for part in entry.parts}
        message = draw.random()

        flying = check_table(table, pipeline, batches)
        step = simulate(table, pipeline, lengths.__getitem__, lambda _: message * draw.random())  # noqa: B023
        assert [[entry for entry, _, _ in row] for row in step.spans] == table and step.in_flight == flying
        busiest = max(sum(lengths[part] for entry in row for part in entry.parts) for row in table)
        assert step.step >= busiest * (1 - 1e-12)
        row = draw.choice(table)
        first, second = draw.randrange(len(row)), draw.randrange(len(row))
        row[first], row[second] = row[second], row[first]
        good = accepts(lambda: check_table(table, pipeline, batches))  # noqa: B023
        assert good == accepts(lambda: simulate(table, pipeline, lengths.__getitem__))  # noqa: B023
        refused += not good
    assert 100 < refused < 900


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda table: table[0].pop(), "has 22 passes, not 24"),
        (lambda table: table[0].append(table[1].pop()), "does not hold stage"),
        (lambda table: table[1].reverse(), "wait for one another"),
    ],
)
def test_a_wrong_table_is_refused(change: Any, words: str) -> None:
    table: Table = interleaved(2, 1, 4)
    change(table)
    with pytest.raises(ValueError, match=words):
        check_table(table, Pipeline(2), 4)


def test_stages_of_a_rank() -> None:
    assert Pipeline(4, 2, schedule="zbv").own(0) == [0, 7] and Pipeline(4, 2).own(0) == [0, 4]
