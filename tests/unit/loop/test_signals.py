"""Signals of real processes: a grace period that ends has a line in time; the same signal again ends at once."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmspeed.loop.signals import StopSignals, grace_of


def busy(folder: Path, seconds: float, grace: float, answers: bool) -> None:
    """Wait in compiled code, which sees no signal, as a rank in an exchange does."""
    sys.stdout = sys.stderr = open(folder / "out.txt", "w")  # noqa: SIM115
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("mmspeed").propagate = True
    logging.getLogger("mmspeed").handlers.clear()  # of a command in an earlier test, whose stream is closed
    with StopSignals(folder, grace, lambda: 10) as requests:
        (folder / "ready").touch()
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1_000_000)
            if answers and requests.poll() == "stop":
                requests.answered()
    sys.stderr.flush()
    os._exit(0)


def wait_for(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


def said(folder: Path) -> str:
    return (folder / "out.txt").read_text()


def begin(folder: Path, seconds: float, grace: float, answers: bool = False) -> mp.process.BaseProcess:
    process = mp.get_context("fork").Process(target=busy, args=(folder, seconds, grace, answers))
    process.start()
    wait_for((folder / "ready").exists, 30)
    return process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_grace_period_that_ends_is_reported_and_the_same_signal_again_ends_at_once(tmp_path: Path) -> None:
    process = begin(tmp_path, 60, grace=1.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    os.kill(process.pid, signal.SIGTERM)  # another signal ends nothing
    wait_for(lambda: "nearly over" in said(tmp_path), 20)
    assert "the 1 s after SIG" in said(tmp_path) and "the last saved step is 10" in said(tmp_path)
    time.sleep(2.1)
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 128 + signal.SIGTERM
    assert "SIGTERM again: ending at once; the last saved step is 10" in said(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_is_reported_where_the_state_was_saved_in_time(tmp_path: Path) -> None:
    process = begin(tmp_path, 6, grace=4.0, answers=True)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    os.kill(process.pid, signal.SIGUSR1)  # passed on by a launcher, too
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "out.txt").read_text().splitlines() == [
        "SIGUSR1: saving and stopping after this step, within 4 s"
    ]


def test_the_grace_period_is_that_of_the_launcher_and_of_slurm() -> None:
    assert grace_of(signal.SIGTERM, {}, 100.0) == 30
    assert grace_of(signal.SIGTERM, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 100.0) == 300
    assert grace_of(signal.SIGTERM, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "SLURM_JOB_ID": "7"}, 100.0) == 30
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "220"}
    assert grace_of(signal.SIGUSR1, job, 100.0) == 120
    assert grace_of(signal.SIGTERM, job, 100.0) == 30 and grace_of(signal.SIGUSR1, job, 300.0) == 30
