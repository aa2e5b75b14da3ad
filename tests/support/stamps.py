"""Commands whose output is stamped as it comes, on a terminal or through a pipe."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamped:
    """The output of a command: pieces with their seconds since its start, its end, its exit code and its processor seconds."""

    pieces: Sequence[tuple[float, str]]
    seconds: float
    code: int
    user_seconds: float

    @property
    def text(self) -> str:
        """All output."""
        return "".join(text for _, text in self.pieces)

    @property
    def first(self) -> float:
        """Seconds before the first output."""
        return self.pieces[0][0] if self.pieces else self.seconds

    @property
    def longest_silence(self) -> tuple[float, str]:
        """The longest time without output, and the end of what was said before it."""
        times = [0.0, *(when for when, _ in self.pieces), self.seconds]
        before = ["(start)", *(text for _, text in self.pieces)]
        gaps = [(later - earlier, text[-160:]) for earlier, later, text in zip(times, times[1:], before, strict=False)]
        return max(gaps)


def stamped(arguments: Sequence[str], folder: Path, tty: bool, timeout: float = 300.0) -> Stamped:
    """Run `python -m mmspeed` with arguments in a folder; both streams go to one terminal or one pipe.

    Raises TimeoutError after `timeout` seconds.
    """
    reader, writer = pty.openpty() if tty else os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "mmspeed", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    pieces: list[tuple[float, str]] = []
    try:
        while True:
            left = started + timeout - time.monotonic()
            if not select.select([reader], [], [], max(0.0, left))[0]:
                raise TimeoutError(f"mmspeed {' '.join(arguments)} was not done after {timeout:.0f} s")
            try:
                data = os.read(reader, 65536)
            except OSError:  # a terminal whose other end is closed
                break
            if not data:
                break
            pieces.append((time.monotonic() - started, data.decode(errors="replace")))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        os.close(reader)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Stamped(pieces, time.monotonic() - started, process.returncode, usage.ru_utime)
