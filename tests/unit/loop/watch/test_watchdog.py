"""The watchdog: limits of phases and signs of life in a real store, by a clock that is set; what its thread says of a phase that hangs, how
it ends a process, and what it leaves alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from mmspeed.config.training import WatchdogConfig
from mmspeed.errors import ERROR_FILE, LAUNCHED
from mmspeed.loop.watch.watchdog import (
    HUNG,
    Heartbeats,
    PhaseClock,
    RunPhase,
    SilenceRule,
    Watchdog,
    limit_of,
    longest_wait,
)
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
    assert over.sentence == "step 5 has taken 81 s, and its limit is 80 s"
    assert phases.overrun() is None
    clock.now += 79.5
    last = phases.overrun()
    assert last is not None and last.last and phases.overrun() is None
    phases.enter(RunPhase.CHECKPOINT, 5)
    clock.now += 1799.0
    assert phases.overrun() is None
    clock.now += 2.0
    first = phases.overrun()
    assert first is not None and first.sentence == "checkpoint at step 5 has taken 1801 s, and its limit is 1800 s"


def test_silence_is_named_after_a_minute_and_ended_after_ten() -> None:
    clock = Clock()
    rule = SilenceRule(60, 600, clock)
    said = []
    assert rule.look(None) is None
    assert rule.look("1") is None
    for _ in range(70):
        clock.now += 10
        verdict = rule.look("1")
        if verdict is not None:
            said.append(verdict)
    assert said == [(70, False), (610, True)]
    clock.now += 10
    assert rule.look("2") is None


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    clock = Clock()
    rule = SilenceRule(60, 600, clock)
    rule.look("1")
    clock.now += 700  # stopped: the others were silent for it alone
    assert rule.look("1") is None
    clock.now += 10
    assert rule.look("1") is None


def test_each_rank_looks_at_the_next() -> None:
    clock, store = Clock(), dist.HashStore()
    ranks = [Heartbeats(store, rank, 3, 4000 + rank, 60, 600, clock) for rank in range(3)]
    results = []
    for minute in range(14):
        for rank in ranks:
            if rank.rank != 1 or minute < 2:  # rank 1 is stopped
                rank.beat(f"step {minute}")
        for rank in ranks:
            if rank.rank != 1 and (seen := rank.look()) is not None:
                results.append((rank.rank, seen))
        clock.now += 20
    ((by, silence),) = results
    assert (by, silence.rank, silence.process, silence.last) == (0, 1, 4001, False)
    assert f"rank 1 ({ranks[1].host}, process 4001) has given no sign of life for 80 s" in silence.sentence
    assert silence.sentence.endswith("its last place was step 1")


def test_ranks_that_end_say_so() -> None:
    clock, store = Clock(), dist.HashStore()
    first, second = (Heartbeats(store, rank, 2, 1, 60, 600, clock) for rank in range(2))
    second.beat("step 1")
    assert first.look() is None
    second.end()
    for _ in range(100):
        clock.now += 20
        assert first.look() is None


def test_past_its_limit_a_rank_is_named_with_its_stacks_and_past_twice_it_is_ended(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in ((LAUNCHED, "1"), (ERROR_FILE, str(tmp_path / "error.json")), ("RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.getLogger("mmspeed"), "propagate", True)
    clock, ended = Clock(), []
    dog = Watchdog(WatchdogConfig(limits={"validation": 30}), 3, 8, clock, ended.append)
    dog.enter(RunPhase.VALIDATION, 40)
    clock.now += 29
    dog.look(None)
    assert not caplog.records
    clock.now += 2
    dog.look(None)
    assert "rank 3 (" in caplog.text and "validation at step 40 has taken 31 s, and its limit is 30 s" in caplog.text
    assert "test_watchdog.py" in capfd.readouterr().err and not ended
    clock.now += 30
    dog.look(None)
    assert ended == [HUNG]
    record = json.loads((tmp_path / "error.json").read_text())
    assert record["kind"] == "hang" and not record["known"]
    assert record["message"].endswith("was ended: validation at step 40 has taken 61 s, and its limit is 30 s")


def test_a_process_without_launcher_is_named_and_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    clock, ended = Clock(), []
    dog = Watchdog(WatchdogConfig(limits={"step": 1}), clock=clock, end=ended.append)
    dog.enter(RunPhase.STEP, 1)
    clock.now += 100
    dog.look(None)
    assert not ended
    monkeypatch.setenv("RANK", "0")
    other = Watchdog(WatchdogConfig(limits={"step": 1}, end=False), clock=clock, end=ended.append)
    other.enter(RunPhase.STEP, 1)
    clock.now += 100
    other.look(None)
    assert not ended


def test_a_silent_process_of_this_host_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    clock, store = Clock(), dist.HashStore()
    silent = Heartbeats(store, 1, 2, stopped.pid, 60, 600, clock)
    silent.beat("step at step 9")
    own = Heartbeats(store, 0, 2, os.getpid(), 60, 600, clock)
    dog = Watchdog(WatchdogConfig(), 0, 2, clock, lambda code: pytest.fail("this process lives"))
    for _ in range(59):
        dog.look(own)
        clock.now += 10
    assert stopped.poll() is None
    for _ in range(4):
        clock.now += 10
        dog.look(own)
    assert stopped.wait(10) == -9


def test_a_silent_process_of_another_host_ends_this_one_so_that_both_launchers_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    clock, store, ended = Clock(), dist.HashStore(), []
    silent = Heartbeats(store, 1, 2, 1, 60, 600, clock)
    silent.host = "another"
    silent.beat("step at step 9")
    own = Heartbeats(store, 0, 2, os.getpid(), 60, 600, clock)
    dog = Watchdog(WatchdogConfig(), 0, 2, clock, ended.append)
    for _ in range(64):
        dog.look(own)
        clock.now += 10
    assert ended == [HUNG]


def test_the_thread_sees_a_real_hang_and_the_process_ends(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from mmspeed.config.training import WatchdogConfig\n"
        "from mmspeed.loop.watch.watchdog import RunPhase, Watchdog\n"
        "with Watchdog(WatchdogConfig(limits={'step': 0.3})) as dog:\n"
        "    dog.enter(RunPhase.STEP, 5)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "RANK": "0"}, timeout=60
    )
    assert done.returncode == HUNG
    assert 'File "<string>", line 6 in <module>' in done.stderr
    assert "was ended: step 5 has taken" in done.stderr
