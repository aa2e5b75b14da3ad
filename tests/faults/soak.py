"""The soak form of the campaign: one long training, and the slopes of its memory, open files and threads over its steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspeed.config import Config
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Case, Outcome, Scene
from tests.support.forks import ended, fork, wait
from tests.support.runs import small_config

BYTES_A_STEP = 1000.0
COUNT_A_STEP = 0.001  # files or threads: one in a thousand steps
SETTLED = 1 / 3  # of the steps, in which caches and pools of memory fill
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """The state of a process after a step: resident bytes, open files, threads."""

    step: int
    memory: int
    files: int
    threads: int


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the straight line of least squares; 0 for fewer than two different places."""
    count = len(points)
    x = sum(point[0] for point in points) / max(1, count)
    y = sum(point[1] for point in points) / max(1, count)
    spread = sum((point[0] - x) ** 2 for point in points)
    return sum((point[0] - x) * (point[1] - y) for point in points) / spread if spread else 0.0


def growth(samples: Sequence[Sample], field: str) -> float:
    """The growth of a field of samples per step, once the process has settled."""
    last = samples[-1].step
    return slope([(one.step, getattr(one, field)) for one in samples if one.step >= last * SETTLED])


def look(process: int, step: int) -> Sample:
    """The state of a process now. Raises OSError where it has ended."""
    folder = Path(f"/proc/{process}")
    memory = int((folder / "statm").read_text().split()[1]) * PAGE
    return Sample(step, memory, len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())))


def last_step(config: Config) -> int:
    """The step of the newest row of a run's metrics; only the end of the file is read."""
    path = config.run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    steps = [line.partition('"step": ')[2].partition(",")[0] for line in lines if '"kind": "train"' in line]
    return int(steps[-1]) if steps and steps[-1].isdigit() else 0


def soak(scene: Scene, hours: float) -> Outcome:
    """Train for so many hours with checkpoints and validations."""
    config = small_config(
        scene.folder,
        "train.steps=100000000",
        "checkpoint.every=50",
        "validate.every=100",
        "train.log_every=5",
        clips=16,
    )
    CacheBuilder(config).run()
    child = fork(TrainPipeline(config).run, scene.folder / "log.txt")
    end, pause = time.monotonic() + hours * 3600, min(10.0, hours * 3600 / 200)
    samples: list[Sample] = []
    while time.monotonic() < end and ended(child) is None:
        time.sleep(pause)
        if (step := last_step(config)) > 0:
            samples.append(look(child, step))
    os.kill(child, signal.SIGTERM)
    code = wait(child, 300)
    memory, files, threads = (growth(samples, field) for field in ("memory", "files", "threads"))
    figure = (
        f"{samples[-1].step} steps in {hours:g} h: memory {memory:+.0f} B a step, files {files:+.5f}, threads {threads:+.5f}; "
        f"at the end {samples[-1].memory / 1e6:.0f} MB, {samples[-1].files} files, {samples[-1].threads} threads"
    )
    return figure, code == 0 and memory < BYTES_A_STEP and files < COUNT_A_STEP and threads < COUNT_A_STEP


def soak_case(hours: float) -> Case:
    """The case of `--soak HOURS`."""
    seconds = hours * 3600 + 900
    return Case(f"soak of {hours:g} hours", lambda scene: soak(scene, hours), seconds, seconds)
