"""Limits of phases, by a clock that is set."""

from __future__ import annotations

import pytest

from mmspeed.config.watchdog import WatchdogConfig
from mmspeed.loop.watch.phases import PhaseClock, RunPhase, limit_of, longest_wait
from tests.support.standing_clock import Clock


def test_a_limit_is_ten_medians_and_a_minute_at_least() -> None:
    config = WatchdogConfig()
    assert limit_of(config, RunPhase.STEP, [1.0, 2.0, 300.0]) == 60
    assert limit_of(config, RunPhase.STEP, [9.0, 12.0, 300.0]) == 120
    assert limit_of(config, RunPhase.VALIDATION, [90.0]) == 900
    for phase in RunPhase:
        first = limit_of(config, phase, [])
        assert first == (float("inf") if phase is RunPhase.IDLE else 1800)
    assert limit_of(config, RunPhase.FIRST_STEP, [1.0]) == limit_of(config, RunPhase.ENCODING, [1.0]) == 1800


def test_limits_of_the_config_count_first() -> None:
    config = WatchdogConfig(limits={"step": 7, "encoding": 9000}, least_seconds=5, factor=2)
    assert limit_of(config, RunPhase.STEP, [100.0]) == 7 and limit_of(config, RunPhase.STEP, []) == 7
    assert limit_of(config, RunPhase.ENCODING, []) == 9000 and limit_of(config, RunPhase.CHECKPOINT, [1.0]) == 5
    assert longest_wait(config) == 2 * 9000 + 60 and longest_wait(WatchdogConfig()) == 3660
    with pytest.raises(ValueError, match="greater than 0"):
        WatchdogConfig(limits={"step": 0})
    with pytest.raises(ValueError, match="'set_up'"):
        WatchdogConfig.model_validate({"limits": {"setup": 3}})


def test_a_phase_overruns_once_and_once_more_past_twice_its_limit() -> None:
    clock = Clock()
    phases = PhaseClock(WatchdogConfig(), clock)
    for step in range(1, 5):
        phases.enter(RunPhase.STEP, step)
        clock.now += 8.0
        assert phases.overrun() is None
    phases.enter(RunPhase.STEP, 5)
    clock.now += 80.0
    assert phases.overrun() is None
    clock.now += 1.0
    over = phases.overrun()
    assert over is not None and not over.last
    assert over.sentence() == "step 5 has taken 81 s, and its limit is 80 s"
    assert phases.overrun() is None
    clock.now += 79.5
    last = phases.overrun()
    assert last is not None and last.last and phases.overrun() is None
    phases.enter(RunPhase.CHECKPOINT, 5)
    clock.now += 1799.0
    assert phases.overrun() is None
    clock.now += 2.0
    first = phases.overrun()
    assert first is not None and first.sentence() == "checkpoint at step 5 has taken 1801 s, and its limit is 1800 s"
