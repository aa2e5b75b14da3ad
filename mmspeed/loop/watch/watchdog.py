"""The watchdog: a thread of each rank that says where the rank is when a phase lasts too long, and ends it when it lasts on."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from mmspeed.config.watchdog import WatchdogConfig
from mmspeed.errors import tell_launcher
from mmspeed.log import get_logger
from mmspeed.rendezvous import ATTEMPT, client

from .heartbeats import Heartbeats
from .phases import PhaseClock, RunPhase, place_in_words

log = get_logger("watchdog")

HUNG = 70  # exit code of a process that the watchdog ended
ASKED = 20.0  # seconds for an answer of the store


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._speak(overrun.sentence(), stacks=True)
            if overrun.last:
                self._leave(overrun.sentence())
        if beats is None:
            return
        beats.beat(place_in_words(*self.phases.place))
        if (sign := beats.look()) is None:
            return
        silence, kill = sign
        self._speak(silence.sentence(), stacks=False)
        if kill and self.config.end and self.launched:
            if silence.host == beats.host:
                self._speak(f"rank {silence.rank} is killed", stacks=False)
                os.kill(silence.process, signal.SIGKILL)
            else:  # its own launcher starts it again with this one's
                self._leave(silence.sentence())

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
