"""What a launcher starts: a user's own script with several pipelines in it, a rank that fails, and a stop on request."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmspeed.config import dump_config
from mmspeed.preprocess import CacheBuilder
from tests.support.runs import losses, small_config

SCRIPT = """
from mmspeed.config import load_config
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder

CacheBuilder(load_config("my-run.yaml")).run()
for name in ("first", "second"):
    TrainPipeline(load_config("my-run.yaml", [f"name={name}"])).run()
"""

ENDLESS = ("train.steps=100000", "checkpoint.every=100000", "validate.every=100000")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, env=environment)


@pytest.mark.slow
def test_a_script_may_run_several_pipelines_under_a_launcher(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=2", "validate.samples=0")
    (tmp_path / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = launch(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    first, second = (losses(small_config(tmp_path, f"name={name}")) for name in ("first", "second"))
    assert first == second and len(first) == 2


@pytest.mark.slow
def test_a_damaged_shard_that_one_rank_meets_ends_all_with_its_message(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=20", "validate.samples=0")
    CacheBuilder(config).run()
    (shard,) = (tmp_path / "cache" / "latents").rglob("*.tar")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(data)
    (tmp_path / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    done = launch(tmp_path, "-m", "mmspeed", "train", "my-run.yaml")
    assert done.returncode != 0
    assert "damaged" in done.stderr and str(shard.name) in done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache."""
    folder = tmp_path_factory.mktemp("launch")
    CacheBuilder(small_config(folder)).run()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_is_no_failure(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = small_config(home, f"name={number.name}", *ENDLESS)
    (tmp_path / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "mmspeed", "train", "my-run.yaml", "--nproc", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 100
    while len(losses(config)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0 and "stopped by" not in errors, errors
    assert len(list((config.run_dir / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_save_and_end(home: Path, tmp_path: Path) -> None:
    config = small_config(home, "name=killed", *ENDLESS)
    (tmp_path / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "mmspeed", "train", "my-run.yaml", "--nproc", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 100
    while len(losses(config)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.kill()
    deadline = time.monotonic() + 100
    with open(config.run_dir / ".lock") as lock:  # held as long as the run is trained
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        else:
            raise AssertionError("the ranks train on")
    assert len(list((config.run_dir / "checkpoints").glob("step-*"))) == 1


def test_a_signal_that_ends_the_ranks_is_reported(tmp_path: Path) -> None:
    program = (
        "import sys, time; from mmspeed.cli import launch; from torch.distributed import run; parse = run.parse_args\n"
        "run.parse_args = lambda args: parse([*args[:3], 'rank.py'])\n"
        "sys.exit(launch.launch([], 2))"
    )
    (tmp_path / "rank.py").write_text("import os, time; open(os.environ['RANK'], 'w').close(); time.sleep(100)")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 60
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "mmspeed: stopped by SIGTERM\n")
