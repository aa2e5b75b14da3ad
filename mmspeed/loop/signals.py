"""Requests to save or to stop a run: SIGTERM, SIGUSR1 (as of Slurm), Ctrl-C, a call, or a file named `save` or `stop` in its folder."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch.distributed as dist

from mmspeed.comm import all_reduce_max
from mmspeed.log import get_logger

Request = Literal["none", "save", "stop"]
REQUESTS: tuple[Request, ...] = ("none", "save", "stop")  # in rising order: the strongest of all ranks wins

log = get_logger("train")

USUAL_GRACE = 30.0  # seconds from SIGTERM to SIGKILL of torchrun, and of Slurm (KillWait) as it comes
REPEAT = 2.0  # seconds within which a signal counts once: a scheduler and a launcher may both pass it on


def grace_of(number: int, environment: Mapping[str, str], now: float) -> float:
    """Seconds that a process has after a signal until it is killed, as far as the environment tells.

    SIGUSR1: until the end of the Slurm job, if its time is known. Otherwise those of torch's launcher, in a Slurm job 30 s at most.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    if number == signal.SIGUSR1 and end.isdigit() and int(end) > now:
        return int(end) - now
    launcher = float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", USUAL_GRACE))
    return min(launcher, USUAL_GRACE) if "SLURM_JOB_ID" in environment else launcher


class StopSignals:
    """A context manager that handles the requests; outside of the main thread, files alone. Former handlers are restored at the end.

    The first signal stops the run after the present step; the same signal again ends the process at once, as does a second Ctrl-C.
    `grace_seconds` from SIGTERM or SIGUSR1 until the process is killed (None: `grace_of`): a line says shortly before that nothing was
    saved since, and the step `saved` on disk. A thread says so, which hears signals while the main thread waits in compiled code.
    """

    def __init__(
        self, run_dir: Path, grace_seconds: float | None = None, saved: Callable[[], int | None] = lambda: None
    ) -> None:
        self.run_dir = run_dir
        self._grace, self._saved = grace_seconds, saved
        self._stop = False
        self._answered = threading.Event()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._former_pipe = -1

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():  # elsewhere Python allows no handlers
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        self._former_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        if self._pipe is not None and self._thread is not None:
            signal.set_wakeup_fd(self._former_pipe)
            os.close(self._pipe[1])  # ends the thread
            self._thread.join()
            os.close(self._pipe[0])
            self._pipe = None
        self._saved = lambda: None  # the run's, which would live on with its models: its events know `stop`

    @property
    def asked(self) -> bool:
        """True after a request to stop."""
        return self._stop

    def answered(self) -> None:
        """Note that the state was saved after the signal, so that there is nothing left to say."""
        self._answered.set()

    def stop(self) -> None:
        """Stop the run after the present step, on all ranks."""
        if not self._stop:
            log.info("a callback stops the run: saving and stopping after this step")
        self._stop = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if number == signal.SIGINT and number in self._before:
            signal.signal(number, self._before.pop(number))

    def _listen(self, pipe: int) -> None:
        """Read the numbers of signals as they come, until the pipe is closed; tell of a grace period that ends."""
        came: dict[int, float] = {}
        deadline: tuple[int, float, float] | None = None  # signal, grace period, moment to tell
        while True:
            rest = None if deadline is None else max(0.0, deadline[2] - time.monotonic())
            if not select.select([pipe], [], [], rest)[0]:
                if deadline is not None and not self._answered.is_set():
                    name = signal.Signals(deadline[0]).name
                    log.warning(
                        f"the {deadline[1]:.0f} s after {name} are nearly over, and the state is not saved yet; {self._last()}"
                    )
                deadline = None
                continue
            numbers = os.read(pipe, 64)
            if not numbers:
                return
            for number in numbers:
                now = time.monotonic()
                again = number in came and now - came[number] > REPEAT
                if number == signal.SIGINT or (number in came and not again):
                    continue
                if again:
                    self._end(number)
                came[number] = now
                grace = self._grace if self._grace is not None else grace_of(number, os.environ, time.time())
                deadline = (number, grace, now + grace - min(2.0, grace / 10))
                log.info(f"{signal.Signals(number).name}: saving and stopping after this step, within {grace:.0f} s")

    def _last(self) -> str:
        step = self._saved()
        return f"the last saved step is {step}" if step is not None else "no step has been saved"

    def _end(self, number: int) -> None:
        log.warning(f"{signal.Signals(number).name} again: ending at once; {self._last()}")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(128 + number)

    def poll(self, group: dist.ProcessGroup | None = None) -> Request:
        """The present request, agreed by all ranks of `group` in one small collective.

        A signal or a call counts from any rank. Rank 0 looks for the files and removes them, so that each counts once.
        """
        strongest = 2 if self._stop else 0
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            strongest = max(strongest, self._take_files())
        request = REQUESTS[int(all_reduce_max([float(strongest)], group)[0])]
        self._stop = self._stop or request == "stop"  # a roll-back may come first
        return request

    def _take_files(self) -> int:
        strongest = 0
        for level, name in enumerate(REQUESTS):
            file = self.run_dir / name
            if level and file.is_file():
                file.unlink(missing_ok=True)
                strongest = level
        return strongest
