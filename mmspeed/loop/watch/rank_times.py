"""Computing time, waits for data and waits for exchanges of each rank, and the ranks that are slower than the others.

On CPU a thread that waits for a message sleeps, so its computing time is the time in which it ran or wanted to run; Linux counts both
(`/proc/thread-self/schedstat`). On an accelerator device events around each forward are read with the row; a wait for other ranks
inside of a forward (sharded weights, split sequences) counts as computing there, and exchanges have no time beside `waits`.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmspeed import comm
from mmspeed.comm import Ledger
from mmspeed.config.training import WatchdogConfig
from mmspeed.device import Device
from mmspeed.errors import first_names
from mmspeed.log import get_logger
from mmspeed.loop.callbacks import BaseCallback, StepOutcome

from .marks import Marks
from .waits import PLACES, Waits

log = get_logger("train")

PARTS = ("compute", "data", "exchange")
SHOWN_RANKS = 64  # of a larger run, rows have the least, the median and the greatest


class ProcessorClock:
    """Seconds that this thread has run on a processor or has waited for one. Elsewhere than on Linux: that it has run."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def __call__(self) -> float:
        if self._file is None:
            return time.thread_time()
        ran, waited, _ = os.pread(self._file, 128, 0).split()
        return (int(ran) + int(waited)) / 1e9

    def asleep(self) -> float:
        """Seconds in which this thread has neither run nor waited for a processor, from a moment of its own."""
        return time.perf_counter() - self()

    def close(self) -> None:
        """Close the file that it reads."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class EventClock:
    """Seconds of all forwards of some models on an accelerator, by events of the device. `read` once the device is done with them."""

    def __init__(self, models: Sequence[nn.Module], device: Device) -> None:
        self._mark = Marks(device)
        self._open: list[Any] = []
        self._pairs: list[tuple[Any, Any]] = []
        self._hooks = [
            hook
            for model in models
            for hook in (
                model.register_forward_pre_hook(self._begin),
                model.register_forward_hook(self._end, prepend=True),  # before that by which a stage ends its call
            )
        ]

    def _begin(self, *_: Any) -> None:
        self._open.append(self._mark())

    def _end(self, *_: Any) -> None:
        begun = self._open.pop()
        if not self._open:  # a model inside of another counts with it
            self._pairs.append((begun, self._mark()))

    def read(self) -> float:
        """Seconds since the last call."""
        pairs, self._pairs = self._pairs, []
        return sum(self._mark.seconds(*pair) for pair in reversed(pairs))

    def close(self) -> None:
        """Take the hooks off the models."""
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True)
class SlowRank:
    """A rank whose computing takes `factor` times as long as the median of the others."""

    rank: int
    factor: float


class SlownessRule:
    """Names slow ranks, once for each stretch of `steps` steps or more. alike: as many in a row do the same work; None: all do."""

    def __init__(self, factor: float, steps: int, alike: int | None = None) -> None:
        self.factor, self.steps, self.alike = factor, steps, alike
        self._count = 0
        self._sums: list[float] = []

    def add(self, steps: int, compute: Sequence[float]) -> list[SlowRank]:
        """Add `steps` steps, with the mean seconds that each rank computed in them; the slow ranks where a stretch ends."""
        if len(compute) < 2:
            return []
        sums = self._sums or [0.0] * len(compute)
        self._sums = [total + steps * mean for total, mean in zip(sums, compute, strict=True)]
        self._count += steps
        if self._count < self.steps:
            return []
        sums, alike = self._sums, self.alike or len(self._sums)
        self._count, self._sums = 0, []
        slow = [
            SlowRank(first + one.rank, one.factor)
            for first in range(0, len(sums), alike)
            for one in slow_ranks(sums[first : first + alike], self.factor)
        ]
        return sorted(slow, key=lambda one: -one.factor)


def slow_ranks(seconds: Sequence[float], factor: float) -> list[SlowRank]:
    """The ranks whose seconds are at least `factor` times the median of all others', slowest first."""
    if len(seconds) < 2:
        return []
    ordered, slow = sorted(seconds), []
    middle = len(ordered) // 2
    for rank, own in enumerate(seconds):
        # the median of all but one is the median of all, or lies beside it
        others = ordered[middle]
        if len(ordered) <= SHOWN_RANKS:
            place = ordered.index(own)
            others = statistics.median(ordered[:place] + ordered[place + 1 :])
        if others > 0 and own / others >= factor:
            slow.append(SlowRank(rank, own / others))
    return sorted(slow, key=lambda one: -one.factor)


class RankTimes(BaseCallback):
    """Callback and context that measures this rank's steps and, with each row, gathers those of all ranks and names the slow ones.

    `waited`: seconds that this rank has waited for data since its start. `ledger`: that of exchanges, whose waits are timed. `alike`: as
    many ranks in a row do the same work, as those of a pipeline's stage, and are compared; None: all do.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        waited: Callable[[], float],
        device: Device,
        config: WatchdogConfig,
        ledger: Ledger,
        alike: int | None = None,
    ) -> None:
        self.waited, self.enabled = waited, config.enabled
        self.rule = SlownessRule(config.slow_factor, config.slow_steps, alike)
        self._processor = ProcessorClock()
        shown = self.enabled and not comm.alone()
        self._events = EventClock(models, device) if shown and device.times_by_events else None
        self._waits = Waits(models, ledger, device, self._processor.asleep) if shown else None
        self._data_mark = waited()
        self._begun = self._ran = self._inside = 0.0
        self._clear()

    def __enter__(self) -> RankTimes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._processor.close()
        if self._events is not None:
            self._events.close()
        if self._waits is not None:
            self._waits.close()

    def _clear(self) -> None:
        self._steps, self._compute, self._data, self._exchange = 0, 0.0, 0.0, 0.0

    def before_step(self, step: int) -> None:
        if self.enabled:
            self._begun, self._ran, self._inside = time.perf_counter(), self._processor(), self.waited()
        if self._waits is not None:
            self._waits.begin()

    def after_step(self, outcome: StepOutcome) -> None:
        if not self.enabled:
            return
        if self._waits is not None:
            self._waits.finish()
        ran, waited = self._processor() - self._ran, self.waited()
        self._data += waited - self._data_mark
        asleep = time.perf_counter() - self._begun - ran - (waited - self._inside)
        self._compute += ran
        self._exchange += max(0.0, asleep)
        self._data_mark = waited
        self._steps += 1

    def row(self) -> dict[str, Any]:
        """Seconds of a step by rank, its waits among them, and the slow ranks. A collective call."""
        if self._waits is None or not self._steps:
            return {}
        compute = self._compute if self._events is None else self._events.read()
        parts = dict(zip(PARTS, (compute, self._data, self._exchange), strict=True)) | self._waits.read()
        own, steps = [seconds / self._steps for seconds in parts.values()], self._steps
        self._clear()
        gathered = comm.all_gather_objects([*own, socket.gethostname()])
        columns = {name: [report[place] for report in gathered] for place, name in enumerate(parts)}
        slow = self.rule.add(steps, columns["compute"])
        shown = PARTS[:2] if self._events is not None else PARTS
        fields: dict[str, Any] = {
            "ranks": {name: _in_short(columns[name]) for name in shown},
            "waits": {name: _in_short(columns[name]) for name in PLACES if any(columns[name])},
        }
        if slow:
            fields["slow_ranks"] = [
                {"rank": one.rank, "host": gathered[one.rank][-1], "factor": round(one.factor, 3)} for one in slow
            ]
            self._name(fields["slow_ranks"])
        return fields

    def _name(self, slow: Sequence[dict[str, Any]]) -> None:
        if torch.distributed.get_rank() != 0:
            return
        named = first_names([f"rank {one['rank']} ({one['host']}) {one['factor']:.2f} x" for one in slow], 4)
        log.warning(f"slow: {named} the median computing time of the other ranks, over {self.rule.steps} steps or more")


def _in_short(column: Sequence[float]) -> list[float]:
    """All ranks, rounded to microseconds; of many the least, the median and the greatest."""
    kept = column if len(column) <= SHOWN_RANKS else [min(column), statistics.median(column), max(column)]
    return [round(value, 6) for value in kept]
