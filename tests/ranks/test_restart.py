"""Runs that go on after a rank has died: by `--max-restarts`, by torchrun's own, and on two launchers of which one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmspeed.config import dump_config
from mmspeed.pipelines import TrainPipeline
from tests.support.launched import losses_by_step, reached, start, steps, wait_for, workers
from tests.support.runs import small_config
from tests.support.spawn import run_ranks

EVERY = 5  # steps between checkpoints
STEPS = 18
LONG = (f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "validate.every=100000", "checkpoint.asynchronous=false")


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache."""
    return Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("restart") / "home"))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
OWN = ("--nproc", "2", "--max-restarts", "2")


def train(folder: str, name: str) -> None:
    TrainPipeline(small_config(Path(folder), f"name={name}", *LONG)).run()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torchrun", "own"])
def test_a_killed_rank_costs_an_interval_and_no_bit(home: Path, tmp_path: Path, way: str) -> None:
    killed, whole = (small_config(home, f"name={way}-{name}", *LONG) for name in ("killed", "whole"))
    launcher = start(tmp_path, killed, *(TORCHRUN if way == "torchrun" else ()), words=OWN if way == "own" else ())
    wait_for(reached(killed, 7))
    os.kill(workers(launcher.pid)[1], signal.SIGKILL)
    at = max(steps(killed))
    wait_for(lambda: not reached(killed, at)() or "attempt 2" in (tmp_path / "log.txt").read_text(), 60)
    wait_for(reached(killed, at + 1), 60)
    assert launcher.wait(100) == 0, (tmp_path / "log.txt").read_text()
    text = (tmp_path / "log.txt").read_text()
    going_on = int(text.split("going on after step ")[1].split()[0])
    assert at - going_on <= EVERY, "at most one interval is lost"
    if way == "own":
        assert "process 1 was killed by SIGKILL; often the machine ran out of memory\nmmspeed: restart 1 of 2" in text
    assert not (killed.run_dir / "attempt.json").exists()
    run_ranks(train, 2, str(home), whole.name)  # in processes that have imported what a command would import
    assert losses_by_step(killed) == losses_by_step(whole) and len(losses_by_step(whole)) == STEPS


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["a rank", "a launcher"])
def test_two_launchers(home: Path, tmp_path: Path, lost: str) -> None:
    config = small_config(home, f"name=two-{lost[2:]}", *LONG[:1], *LONG[1:], "train.steps=60")
    port = free_port()
    common = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")
    common += ("--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf")
    folders = [tmp_path / name for name in ("first", "second")]
    launchers = []
    for host, folder in enumerate(folders):
        folder.mkdir()
        settings = f"last_call_timeout=4,is_host={host == 0}"
        launchers.append(start(folder, config, *common, settings))
    wait_for(reached(config, 12), 150)
    at = max(steps(config))
    if lost == "a rank":
        (process,) = workers(launchers[1].pid).values()
        os.kill(process, signal.SIGKILL)
    else:
        second = launchers[1]
        for process in workers(second.pid).values():
            os.kill(process, signal.SIGKILL)
        second.kill()
    began = time.monotonic()
    wait_for(lambda: any("going on after step" in (folder / "log.txt").read_text() for folder in folders), 100)
    wait_for(reached(config, at + 1), 60)
    print(f"training again after {time.monotonic() - began:.0f} s")
    assert launchers[0].wait(200) == 0, (folders[0] / "log.txt").read_text()
    if lost == "a rank":
        assert launchers[1].wait(30) == 0
    assert steps(config) == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize("silent", [8, 600], ids=["killed by its neighbour", "ended with its launcher's attempt"])
def test_a_stopped_rank_is_named_and_the_run_goes_on(home: Path, tmp_path: Path, silent: int) -> None:
    limits = ("train.watchdog.least_seconds=5", "train.watchdog.factor=1", f"train.watchdog.silent_seconds={silent}")
    config = small_config(home, f"name=stopped-{silent}", *LONG, *limits, "train.steps=60")
    launcher = start(tmp_path, config, words=OWN)
    wait_for(reached(config, 12))
    os.kill(workers(launcher.pid)[1], signal.SIGSTOP)
    assert launcher.wait(200) == 0, (tmp_path / "log.txt").read_text()
    text = (tmp_path / "log.txt").read_text()
    assert "has given no sign of life for" in text and "rank 1 (" in text, text
    assert "has taken" in text and "its limit is 5 s; its threads are at:" in text and 'loop/step.py", line' in text
    killed = "rank 1 is killed" if silent < 600 else "was ended: step"
    assert killed in text and "mmspeed: restart 1 of 2" in text, text
    assert steps(config) == list(range(1, 61))


FAILS = """
import os, signal, sys
from mmspeed.config import load_config
from mmspeed.pipelines import TrainCallback, TrainPipeline

class Fails(TrainCallback):
    def on_step(self, event):
        if event.step == 7 and event.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

from mmspeed.cli.failures import report
try:
    TrainPipeline(load_config("my-run.yaml"), callbacks=[Fails()]).run()
except Exception as error:
    code = report(error, False)
    sys.stderr.flush()
    os._exit(code)
"""


@pytest.mark.slow
def test_the_same_step_failing_twice_ends_the_run_with_its_samples(home: Path, tmp_path: Path) -> None:
    config = small_config(home, "name=twice", *LONG)
    (tmp_path / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "script.py").write_text(FAILS, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *TORCHRUN[:-1], "9", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode != 0
    assert "step 7 failed in two attempts in a row, so the run ends; its samples: " in done.stderr, done.stderr
    line = done.stderr.split("its samples: ")[1].splitlines()[0]
    assert line.count(".mp4") == 3, line
    assert "lost the connection to another rank" in done.stderr
