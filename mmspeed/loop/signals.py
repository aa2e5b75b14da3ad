"""Asking a run to save or to stop: SIGTERM, Ctrl-C, or a file named `save` or `stop` put into the run's folder."""

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
    """Use as a context manager; outside of the main thread only the files count. The handlers found before are put back at the end.

    The first SIGINT asks the run to stop after this step; the second interrupts at once.
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
        """What is asked for now, agreed by all ranks of `group` in one small collective.

        A signal counts from any rank. Files are looked for and removed by rank 0, so that each asks once.
        """
        asked = 2 if self._stop else 0
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            asked = max(asked, self._take_files())
        return REQUESTS[int(all_reduce_max([float(asked)], group)[0])]

    def _take_files(self) -> int:
        found = 0
        for level, name in enumerate(REQUESTS):
            file = self.run_dir / name
            if level and file.is_file():
                file.unlink(missing_ok=True)
                found = level
        return found
