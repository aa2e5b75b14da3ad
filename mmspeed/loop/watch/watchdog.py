"""The watchdog: a thread of each rank that says where the rank is when a phase lasts too long, and ends it when it lasts on.

Each phase of a run has a limit of its own (`limit_of`). A stopped process (SIGSTOP, a frozen container, a node that is gone) cannot say
so itself: each rank writes signs of life to the store and looks at those of the next one, so the cost of a rank does not grow with their
number. All rules count by a clock that is handed in.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist

from mmspeed.config.training import WatchdogConfig
from mmspeed.errors import tell_launcher
from mmspeed.log import get_logger
from mmspeed.rendezvous import ATTEMPT, client

log = get_logger("watchdog")

HUNG = 70  # exit code of a process that the watchdog ended
ASKED = 20.0  # seconds for an answer of the store
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


@dataclass(frozen=True)
class Place:
    """A place in a run: a step, counted from 1, and the part of its work, as `RunPhase.words`."""

    step: int
    part: str

    def __str__(self) -> str:
        return f"step {self.step}" if self.part == "step" else f"{self.part} at step {self.step}"


@dataclass(frozen=True)
class Late:
    """What is late: a sentence about it, and True past the limit at which it is ended."""

    sentence: str
    last: bool


class PhaseClock:
    """The phase of this process and the durations of those before it. `enter` is called by the loop, `overrun` by a thread."""

    def __init__(self, config: WatchdogConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self._now: tuple[RunPhase, int, float] = (RunPhase.IDLE, 0, clock())
        self._durations: dict[RunPhase, deque[float]] = {phase: deque(maxlen=REMEMBERED) for phase in _TIMED}
        # the last phase that overran, and if for the last time
        self._said: tuple[tuple[RunPhase, int, float], bool] | None = None

    @property
    def place(self) -> Place:
        """The present place."""
        phase, step, _ = self._now
        return Place(step, phase.words)

    def enter(self, phase: RunPhase, step: int) -> None:
        """Begin a phase now, which ends the one before."""
        now = self.clock()
        before, _, began = self._now
        if before in self._durations:
            self._durations[before].append(now - began)
        self._now = (phase, step, now)

    def overrun(self) -> Late | None:
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
        return Late(f"{Place(step, phase.words)} has taken {seconds:.0f} s, and its limit is {limit:.0f} s", last)


@dataclass(frozen=True)
class Silence(Late):
    """A rank without a sign of life, with its host and its process there."""

    rank: int
    host: str
    process: int


class SilenceRule:
    """Says once when a sign has not changed for `named_after` seconds, and once more after `killed_after`, by a clock that is handed in."""

    def __init__(self, named_after: float, killed_after: float, clock: Callable[[], float]) -> None:
        self.named_after, self.killed_after, self.clock = named_after, killed_after, clock
        self._sign: str | None = None
        self._since = self._looked = clock()
        self._said = 0  # 1: named, 2: to be killed

    def look(self, sign: str | None) -> tuple[float, bool] | None:
        """(seconds of silence, True if the rank is to be killed), for the present sign; None where there is nothing new to say.

        A rank that has given no sign yet, or has said that it ends, is not silent.
        """
        now = self.clock()
        # this process was stopped itself: it knows nothing of that time
        asleep = now - self._looked > self.named_after / 2
        self._looked = now
        if sign != self._sign or not sign or asleep:
            self._sign, self._since, self._said = sign, now, 0
            return None
        seconds = now - self._since
        level = 2 if seconds > self.killed_after else 1 if seconds > self.named_after else 0
        if level <= self._said:
            return None
        self._said = level
        return seconds, level == 2


class Heartbeats:
    """The signs of one process in a store, and its look at the next rank. Not for several threads."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        process: int,
        named_after: float,
        killed_after: float,
        clock: Callable[[], float],
    ) -> None:
        self.store, self.rank, self.process = store, rank, process
        self.next = (rank + 1) % world
        self.host = socket.gethostname()
        self.rule = SilenceRule(named_after, killed_after, clock)
        self._count = 0

    def beat(self, place: str) -> None:
        """Give a sign of life."""
        self._count += 1
        self.store.set(f"alive/{self.rank}", json.dumps([self._count, self.host, self.process, place]))

    def end(self) -> None:
        """Say that no sign will follow."""
        self.store.set(f"alive/{self.rank}", "")

    def look(self) -> Silence | None:
        """The silence of the next rank; None where there is nothing new to say."""
        rank, key = self.next, f"alive/{self.next}"
        sign = self.store.get(key).decode() if self.store.check([key]) else None
        verdict = self.rule.look(sign)
        if verdict is None or not sign:
            return None
        _, host, process, place = json.loads(sign)
        since = f"has given no sign of life for {verdict[0]:.0f} s; its last place was {place}"
        return Silence(f"rank {rank} ({host}, process {process}) {since}", verdict[1], rank, host, process)


class Watchdog:
    """Context in which `enter(phase, step)` says what the process does. Does nothing where the config disables it.

    Ranks that share a store give signs of life there. `end` is what ends this process.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        rank: int = 0,
        world: int = 1,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.phases = PhaseClock(config, clock)
        self._clock, self._end = clock, end
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._armed = False

    @property
    def pause(self) -> float:
        """Seconds between two looks: a sixth of the shortest limit, and 10 at most."""
        shortest = min([self.config.least_seconds, self.config.silent_seconds, *self.config.limits.values()])
        return min(10.0, shortest / 6)

    @property
    def launched(self) -> bool:
        """True where a launcher started this process, which sees its end."""
        return "RANK" in os.environ

    def __enter__(self) -> Watchdog:
        if self.config.enabled:
            self._thread = threading.Thread(target=self._watch, name="mmspeed-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * ASKED)
        if self._armed:
            faulthandler.cancel_dump_traceback_later()

    def enter(self, phase: RunPhase, step: int) -> None:
        """Begin a phase now, which ends the one before."""
        self.phases.enter(phase, step)

    def look(self, beats: Heartbeats | None) -> None:
        """Look once at this rank and at the next one."""
        overrun = self.phases.overrun()
        if overrun is not None:
            self._speak(overrun.sentence, stacks=True)
            if overrun.last:
                self._leave(overrun.sentence)
        if beats is None:
            return
        beats.beat(str(self.phases.place))
        if (silence := beats.look()) is None:
            return
        self._speak(silence.sentence, stacks=False)
        if silence.last and self.config.end and self.launched:
            if silence.host == beats.host:
                self._speak(f"rank {silence.rank} is killed", stacks=False)
                os.kill(silence.process, signal.SIGKILL)
            else:  # its own launcher starts it again with this one's
                self._leave(silence.sentence)

    def _watch(self) -> None:
        beats = self._heartbeats()
        while not self._stopped.wait(self.pause):
            self._arm()
            try:
                self.look(beats)
            except RuntimeError as error:  # the store is gone, and with it the launcher or its node
                self._speak(f"signs of life of the ranks are at an end: {str(error).splitlines()[0]}", stacks=False)
                beats = None
        if beats is not None:
            try:
                beats.end()
            except RuntimeError:
                return

    def _heartbeats(self) -> Heartbeats | None:
        if self.world == 1 or not self.launched or "MASTER_PORT" not in os.environ:
            return None
        try:
            store = client(ASKED)
        except RuntimeError as error:
            self._speak(f"no signs of life of the ranks: {str(error).splitlines()[0]}", stacks=False)
            return None
        apart = dist.PrefixStore(f"mmspeed/watchdog/{os.environ.get(ATTEMPT, '')}", store)
        config = self.config
        return Heartbeats(
            apart, self.rank, self.world, os.getpid(), config.least_seconds, config.silent_seconds, self._clock
        )

    def _arm(self) -> None:
        """Let the C library end this process where even this thread cannot run, as when a library never gives Python's lock back."""
        if self.launched and self.config.end:
            self._armed = True
            faulthandler.dump_traceback_later(self.config.silent_seconds + 2 * self.pause, exit=True)

    def _speak(self, sentence: str, stacks: bool) -> None:
        log.warning(f"rank {self.rank} ({socket.gethostname()}): {sentence}{'; its threads are at:' if stacks else ''}")
        if stacks:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

    def _leave(self, sentence: str) -> None:
        if not (self.config.end and self.launched):
            return
        message = f"mmspeed: error: rank {self.rank} ({socket.gethostname()}) was ended: {sentence}"
        if not tell_launcher(message, HUNG, known=False, kind="hang"):
            print(message, file=sys.stderr, flush=True)
        self._end(HUNG)
