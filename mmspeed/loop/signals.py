"""Requests to save or to stop a run: SIGTERM, Ctrl-C, or a file named `save` or `stop` in the run's folder."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch.distributed as dist

from mmspeed.comm import all_reduce_max

Request = Literal["none", "save", "stop"]
REQUESTS: tuple[Request, ...] = ("none", "save", "stop")  # in rising order: the strongest of all ranks wins


class StopSignals:
    """A context manager that handles the requests; outside of the main thread, files alone. Former handlers are restored at the end.

    The first SIGINT stops the run after the present step; the second interrupts at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        in_main = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
        for number in (signal.SIGTERM, signal.SIGINT) if in_main else ():
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if number == signal.SIGINT and number in self._before:
            signal.signal(number, self._before.pop(number))

    def poll(self, group: dist.ProcessGroup | None = None) -> Request:
        """The present request, agreed by all ranks of `group` in one small collective.

        A signal counts from any rank. Rank 0 looks for the files and removes them, so that each counts once.
        """
        strongest = 2 if self._stop else 0
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            strongest = max(strongest, self._take_files())
        return REQUESTS[int(all_reduce_max([float(strongest)], group)[0])]

    def _take_files(self) -> int:
        strongest = 0
        for level, name in enumerate(REQUESTS):
            file = self.run_dir / name
            if level and file.is_file():
                file.unlink(missing_ok=True)
                strongest = level
        return strongest
