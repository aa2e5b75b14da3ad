"""Slow ranks: the rule on made-up times, the clock of a thread on real work, and the row of real steps."""

from __future__ import annotations

import time

import pytest
from torch import nn

from mmspeed.config.training import WatchdogConfig
from mmspeed.device import Device
from mmspeed.loop.callbacks import StepOutcome
from mmspeed.loop.watch.rank_times import RankTimes, SlownessRule, slow_ranks
from mmspeed.protocols import StepData
from tests.support.spawn import run_ranks


def test_a_rank_13_times_as_slow_over_20_steps_is_named() -> None:
    rule = SlownessRule(1.25, 20)
    assert rule.add(10, [1.0, 1.3, 1.02, 0.98]) == []
    (slow,) = rule.add(10, [1.0, 1.3, 1.02, 0.98])
    assert slow.rank == 1 and slow.factor == pytest.approx(1.3)
    assert rule.add(10, [1.0, 1.0, 1.0, 1.0]) == [] and rule.add(10, [1.0, 1.5, 1.0, 1.0]) != []


def test_a_short_delay_is_not_named() -> None:
    rule = SlownessRule(1.25, 20)
    assert rule.add(5, [1.0, 1.6]) == [] and rule.add(15, [1.0, 1.0]) == []


def test_two_ranks_are_compared_with_each_other() -> None:
    assert [slow.rank for slow in slow_ranks([1.0, 1.3], 1.25)] == [1]
    assert slow_ranks([1.0], 1.25) == slow_ranks([0.0, 0.0], 1.25) == [] == slow_ranks([1.0, 1.2], 1.25)
    many = [1.0] * 1000
    many[7], many[900] = 1.4, 2.0
    assert [slow.rank for slow in slow_ranks(many, 1.25)] == [900, 7]
    assert SlownessRule(1.25, 1).add(1, [1.0]) == []


def test_ranks_of_a_stage_are_compared_with_each_other() -> None:
    seconds = [1.0, 1.0, 1.0, 2.0, 2.6, 2.0]
    assert [slow.rank for slow in SlownessRule(1.25, 1, alike=3).add(1, seconds)] == [4]
    assert SlownessRule(1.25, 1, alike=1).add(1, seconds) == []
    assert [slow.rank for slow in SlownessRule(1.25, 1).add(1, seconds)] == [4, 3, 5]


class CountedClock:
    """Processor time that moves only when the test says so, whatever else the machine does."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def close(self) -> None:
        pass


def slow_steps(work: float) -> dict[str, object]:
    from mmspeed import comm

    own = work * (1.5 if comm.all_gather_objects(0) and __import__("os").environ["RANK"] == "1" else 1.0)
    times = RankTimes([nn.Linear(1, 1)], lambda: 0.0, Device("cpu", 0), WatchdogConfig(), comm.Ledger())
    times._processor.close()
    clock = times._processor = CountedClock()  # type: ignore[assignment]
    with times:
        for step in range(20):
            times.before_step(step)
            time.sleep(own)
            clock.seconds += own
            comm.barrier()
            times.after_step(StepOutcome(step + 1, 0, StepData({}, [], [], {}), None))
        row: dict[str, object] = times.row()
    return row


def test_a_slow_rank_of_two_is_in_the_row() -> None:
    row, other = run_ranks(slow_steps, 2, 0.02)
    assert row == other
    ((slow),) = row["slow_ranks"]
    assert slow["rank"] == 1 and slow["factor"] == pytest.approx(1.5)
    ranks = row["ranks"]
    assert set(ranks) == {"compute", "data", "exchange"} and ranks["compute"] == pytest.approx([0.02, 0.03])
    assert ranks["exchange"][0] > 0.004 > 0, "the fast rank waits for the slow one"
