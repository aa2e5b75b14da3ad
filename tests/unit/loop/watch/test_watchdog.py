"""The watchdog's thread: what it says of a phase that hangs, how it ends a process, and what it leaves alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmspeed.config.watchdog import WatchdogConfig
from mmspeed.errors import ERROR_FILE, LAUNCHED
from mmspeed.loop.watch.heartbeats import Heartbeats
from mmspeed.loop.watch.phases import RunPhase
from mmspeed.loop.watch.watchdog import HUNG, Watchdog
from tests.support.standing_clock import Clock


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
    import torch.distributed as dist

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
    import torch.distributed as dist

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
        "from mmspeed.config.watchdog import WatchdogConfig\n"
        "from mmspeed.loop.watch.phases import RunPhase\n"
        "from mmspeed.loop.watch.watchdog import Watchdog\n"
        "with Watchdog(WatchdogConfig(limits={'step': 0.3})) as dog:\n"
        "    dog.enter(RunPhase.STEP, 5)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "RANK": "0"}, timeout=60
    )
    assert done.returncode == HUNG
    assert 'File "<string>", line 7 in <module>' in done.stderr
    assert "was ended: step 5 has taken" in done.stderr
