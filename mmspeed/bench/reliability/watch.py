"""The processor time that the watchdog, the record of attempts and the times of ranks take, a step and a look of the thread."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch.distributed as dist

from mmspeed.comm import Ledger
from mmspeed.config.training import WatchdogConfig
from mmspeed.device import Device
from mmspeed.loop.callbacks import StepOutcome
from mmspeed.loop.watch.rank_times import ProcessorClock, RankTimes
from mmspeed.loop.watch.run_watch import AttemptRecord
from mmspeed.loop.watch.waits import Waits
from mmspeed.loop.watch.watchdog import Heartbeats, RunPhase, Watchdog
from mmspeed.protocols import StepData
from mmspeed.protocols.batch import TrackedBatches

STEP_SECONDS = 1.0  # of the step whose share is shown
WATCHDOG_GOAL, RANKS_GOAL = 0.001, 0.002  # shares of a step


@dataclass(frozen=True)
class WatchCost:
    """Medians in microseconds of processor time: of a step's calls, and of one look of the thread, every `pause` seconds."""

    phases: float
    record: float
    look: float
    pause: float
    ranks: float
    wait: float  # that of one exchange

    @property
    def watchdog_share(self) -> float:
        """The watchdog's and the record's share of a step of `STEP_SECONDS`."""
        return (self.phases + self.record + self.look * STEP_SECONDS / self.pause) / 1e6 / STEP_SECONDS

    @property
    def ranks_share(self) -> float:
        """The share of the times of ranks, without their exchange with each row."""
        return self.ranks / 1e6 / STEP_SECONDS

    def passed(self) -> bool:
        """True where both shares keep their goals."""
        return self.watchdog_share < WATCHDOG_GOAL and self.ranks_share < RANKS_GOAL

    def lines(self) -> list[str]:
        """The figures for people."""
        return [
            f"watchdog: {self.phases:.1f} us a step; record of attempts {self.record:.1f} us; a look {self.look:.0f} us "
            f"every {self.pause:.0f} s; {self.watchdog_share:.5%} of a step of {STEP_SECONDS:.0f} s (goal: below {WATCHDOG_GOAL:.1%})",
            f"times of ranks: {self.ranks:.1f} us a step, {self.ranks_share:.5%} of it (goal: below {RANKS_GOAL:.1%}); "
            f"with each row one gather of seven values a rank; {self.wait:.1f} us for each exchange whose wait is timed",
        ]

    def to_json(self) -> str:
        """The figures for programs."""
        shares = {"watchdog_share": self.watchdog_share, "ranks_share": self.ranks_share}
        return json.dumps(asdict(self) | shares, indent=2)


def bench_watch(rounds: int = 5, calls: int = 2000) -> WatchCost:
    """Measure each part alone, in this thread: medians of `rounds` means over `calls` calls. The store is one of torch over TCP."""
    config = WatchdogConfig()
    dog = Watchdog(config, 0, 2)
    data = StepData({}, cast(TrackedBatches, ()), [], {})
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    beats = Heartbeats(store, 0, 2, os.getpid(), config.least_seconds, config.silent_seconds, time.monotonic)
    ledger, clock = Ledger(), ProcessorClock()
    times = RankTimes([], lambda: 0.0, Device("cpu", 0), config, ledger)
    waits = Waits([], ledger, Device("cpu", 0), clock.asleep)
    outcome = StepOutcome(1, 0, data, None)

    def exchange(_: int) -> None:
        with waits.waiting("experts"):
            pass

    def ranks(step: int) -> None:
        times.before_step(step)
        times.after_step(outcome)

    with tempfile.TemporaryDirectory() as folder, times:
        record = AttemptRecord(Path(folder) / "attempt.json", "bench")
        record.begin(0)

        def recorded(step: int) -> None:  # as a step does: once before and once behind the wait for its data
            record.at(step, "step")
            record.at(step, "step", data)

        cost = WatchCost(
            phases=_median(lambda step: dog.enter(RunPhase.STEP, step), rounds, calls),
            record=_median(recorded, rounds, calls),
            look=_median(lambda step: dog.look(beats), rounds, max(1, calls // 10)),
            pause=dog.pause,
            ranks=_median(ranks, rounds, calls),
            wait=_median(exchange, rounds, calls),
        )
        record.end()
    clock.close()
    return cost


def _median(call: Callable[[int], None], rounds: int, calls: int) -> float:
    """Microseconds of processor time of a call."""
    means = []
    for _ in range(rounds):
        began = time.process_time()
        for step in range(calls):
            call(step)
        means.append((time.process_time() - began) / calls * 1e6)
    return statistics.median(means)
