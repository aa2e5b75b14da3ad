"""Runs of `mmspeed train` under a launcher, in the background, and what they have reached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mmspeed.config import Config, dump_config
from mmspeed.log import read_metrics


def start(folder: Path, config: Config, *launcher: str, words: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """`python LAUNCHER mmspeed train` of a config, in the background; its output in `log.txt`."""
    (folder / "my-run.yaml").write_text(dump_config(config), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, "-m", "mmspeed", "train", "my-run.yaml", *words]
    with open(folder / "log.txt", "a") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )


def workers(launcher: int) -> dict[int, int]:
    """The processes of a launcher's ranks, by rank."""
    results: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) != launcher:
                continue
            variables = dict(pair.split("=", 1) for pair in (folder / "environ").read_text().split("\0") if "=" in pair)
        except OSError:
            continue
        if "RANK" in variables:
            results[int(variables["RANK"])] = int(folder.name)
    return results


def steps(config: Config) -> list[int]:
    return [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]


def losses_by_step(config: Config) -> dict[int, float]:
    return {
        row["step"]: row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"
    }


def wait_for(ready: Callable[[], bool], seconds: float = 100.0, pause: float = 0.05) -> None:
    """Return once `ready()`; raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"it does not come within {seconds:.0f} s"
        time.sleep(pause)


def reached(config: Config, step: int) -> Callable[[], bool]:
    return lambda: (config.run_dir / "metrics.jsonl").exists() and max(steps(config), default=0) >= step
