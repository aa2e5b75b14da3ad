"""Phases of a run and the time that each may take, as pure rules on a clock that is handed in."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mmspeed.config.watchdog import WatchdogConfig

REMEMBERED = 100  # durations of a phase whose median counts


class RunPhase(StrEnum):
    """A part of a run that has a limit of its own; the values are those of `train.watchdog.limits`."""

    SET_UP = "set_up"
    FIRST_STEP = "first_step"  # of a shape that this process has not computed before
    STEP = "step"
    ENCODING = "encoding"  # a step of the first epoch, which may wait for its encoders
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    IDLE = "idle"  # nothing is under way that could hang

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.value.replace("_", " ").replace("set up", "set-up")


_TIMED = (RunPhase.STEP, RunPhase.CHECKPOINT, RunPhase.VALIDATION)  # whose durations say what is usual


def limit_of(config: WatchdogConfig, phase: RunPhase, durations: Sequence[float]) -> float:
    """Seconds that a phase may take: the config's, or the longer of `least_seconds` and `factor` x the median of its `durations`.

    A phase without durations, as each is at first, has `first_seconds`.
    """
    if phase is RunPhase.IDLE:
        return float("inf")
    limits: Mapping[str, float] = {str(name): value for name, value in config.limits.items()}
    if phase.value in limits:
        return limits[phase.value]
    if phase not in _TIMED or not durations:
        return config.first_seconds
    return max(config.least_seconds, config.factor * statistics.median(durations))


def longest_wait(config: WatchdogConfig) -> float:
    """Seconds after which an exchange of ranks has failed, whatever phase it is in: longer than the watchdog waits before it ends one."""
    return 2 * max(config.first_seconds, config.least_seconds, *config.limits.values(), config.silent_seconds) + 60


def place_in_words(phase: RunPhase, step: int) -> str:
    """`step 12`, `validation at step 12`."""
    return f"step {step}" if phase is RunPhase.STEP else f"{phase.words} at step {step}"


@dataclass(frozen=True)
class Overrun:
    """A phase that has taken longer than it may."""

    phase: RunPhase
    step: int
    seconds: float
    limit: float
    last: bool  # True past twice the limit

    def sentence(self) -> str:
        """`step 12 has taken 61 s and may take 60 s`."""
        return f"{place_in_words(self.phase, self.step)} has taken {self.seconds:.0f} s, and its limit is {self.limit:.0f} s"


class PhaseClock:
    """The phase of this process and the durations of those before it. `enter` is called by the loop, `overrun` by a thread."""

    def __init__(self, config: WatchdogConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self._now: tuple[RunPhase, int, float] = (RunPhase.IDLE, 0, clock())
        self._durations: dict[RunPhase, deque[float]] = {phase: deque(maxlen=REMEMBERED) for phase in _TIMED}
        self._said: tuple[tuple[RunPhase, int, float], bool] | None = (
            None  # the last phase that overran, and if for the last time
        )

    @property
    def place(self) -> tuple[RunPhase, int]:
        """The present phase and step."""
        return self._now[:2]

    def enter(self, phase: RunPhase, step: int) -> None:
        """Begin a phase now, which ends the one before."""
        now = self.clock()
        before, _, began = self._now
        if before in self._durations:
            self._durations[before].append(now - began)
        self._now = (phase, step, now)

    def overrun(self) -> Overrun | None:
        """The present phase where it is past its limit, once, and past twice its limit, once more; else None."""
        present = self._now
        phase, step, began = present
        # a copy: the loop may add a duration meanwhile
        limit = limit_of(self.config, phase, tuple(self._durations.get(phase, ())))
        seconds = self.clock() - began
        if seconds <= limit:
            return None
        last = seconds > 2 * limit
        if self._said == (present, last) or self._said == (present, True):
            return None
        self._said = (present, last)
        return Overrun(phase, step, seconds, limit, last)
