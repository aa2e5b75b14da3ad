"""Runs of several ranks under a launcher that restarts them, with ranks killed at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmspeed.config import Config
from tests.support.launched import losses_by_step, start, steps, wait_for, workers

Moment = Literal["step", "checkpoint", "validation", "first epoch"]
PATIENCE = 240.0  # seconds for training to come, on a busy machine


@dataclass(frozen=True)
class Recovery:
    """A kill and what came of it: the part of the run that it met, the steps that were lost, the seconds until a step is trained again."""

    rank: int
    part: str
    lost: int
    seconds: float


class KilledRun:
    """A run of `ranks` processes under `mmspeed train --nproc --max-restarts`, or under torchrun's own `--max-restarts`."""

    def __init__(
        self, folder: Path, config: Config, ranks: int, restarts: int, draw: random.Random, torchrun: bool = False
    ) -> None:
        self.folder, self.config, self.ranks, self.draw = folder, config, ranks, draw
        folder.mkdir(parents=True, exist_ok=True)
        self.recoveries: list[Recovery] = []
        self._last_step = -1  # at which a rank was killed: two failures in one place would end the run
        often = ("--max-restarts", str(restarts))
        if torchrun:
            launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *often)
            self.launcher = start(folder, config, *launcher)
        else:
            self.launcher = start(folder, config, words=("--nproc", str(ranks), *often))

    def log(self) -> str:
        """The output so far."""
        return (self.folder / "log.txt").read_text()

    def place(self) -> tuple[int, int, str]:
        """The attempt, the step and the part of the run that rank 0 is at; (-1, 0, "") before it says so."""
        try:
            record = json.loads((self.config.run_dir / "attempt.json").read_text())
            return record["attempt"], record["place"]["step"], record["place"]["part"]
        except (OSError, ValueError):
            return -1, 0, ""

    def _alive(self, ready: Callable[[], bool]) -> None:
        """Wait; raises AssertionError where the launcher ends first."""

        def check() -> bool:
            assert self.launcher.poll() is None, f"the launcher ended: {self.log()[-1500:]}"
            return ready()

        wait_for(check, PATIENCE, pause=0.001)

    def _reached(self) -> int:
        return max(steps(self.config), default=0)

    def _first_step_after(self, attempt: int, step: int) -> bool:
        """True once an attempt that went on after `step` has trained a step."""
        now, place, part = self.place()
        return now >= attempt and (place > step + 1 or (place == step + 1 and part != "step"))

    def kill(self, moment: Moment) -> None:
        """Kill a random rank in such a part of the run, and wait until the run that goes on has trained a step."""
        number = len(self.recoveries)
        wanted = self._last_step + 2 + (self.draw.randrange(6) if moment != "first epoch" else 0)

        def ready() -> bool:
            attempt, step, part = self.place()
            if attempt < number or step < wanted:
                return False
            return part == moment if moment in ("checkpoint", "validation") else part == "step"

        self.kill_when(ready, "first epoch" if moment == "first epoch" else None)

    def kill_when(self, ready: Callable[[], bool], where: str | None = None) -> bool:
        """Kill a random rank once `ready()`, which it still was when the rank was dead, else False; wait as `kill` does.

        `where`: the part of the run that it is in, if it is another than the record of the attempt says.
        """
        number = len(self.recoveries)
        self._alive(lambda: self.place()[0] >= number)
        processes = workers(self.launcher.pid)
        self._alive(ready)
        time.sleep(self.draw.uniform(0.0, 0.02))
        rank = self.draw.choice(sorted(processes))
        os.kill(processes[rank], signal.SIGKILL)
        began = time.monotonic()
        still = ready()
        _, self._last_step, part = self.place()
        at = self._reached()
        line = f"attempt {number + 2}: the last one ended at "
        self._alive(lambda: line in self.log())
        went_on = int(re.findall(rf"attempt {number + 2}: .*going on after step (\d+)", self.log())[0])
        self._alive(lambda: self._first_step_after(number + 1, went_on))
        self.recoveries.append(Recovery(rank, where or part, at - went_on, time.monotonic() - began))
        return still

    def end(self) -> int:
        """The exit code of the launcher, once it has ended."""
        return self.launcher.wait(600)


def summary(recoveries: list[Recovery]) -> str:
    """The kills by part, the steps lost and the seconds to recover, in words."""
    parts = ", ".join(f"{count} in {part}" for part, count in Counter(one.part for one in recoveries).most_common())
    seconds = [one.seconds for one in recoveries]
    return (
        f"{len(recoveries)} kills recovered ({parts}); at most {max(one.lost for one in recoveries)} steps lost; training again "
        f"after {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (worst)"
    )


def same_losses(one: Config, other: Config) -> bool:
    """True where two runs have the same losses, bit by bit, at all of the steps."""
    return losses_by_step(one) == losses_by_step(other) and len(losses_by_step(one)) == one.train.steps
