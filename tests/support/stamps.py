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
    """The output of a command: pieces with their seconds since its start, its end, its exit code and its processor seconds.

    `busy`: the processor seconds of its first process at each piece and at its end, which a busy machine does not lengthen.
    """

    pieces: Sequence[tuple[float, str]]
    busy: Sequence[float]
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
    def first_busy(self) -> float:
        """Processor seconds before the first output."""
        return self.busy[0]

    @property
    def longest_silence(self) -> tuple[float, str]:
        """The longest time without output, and the end of what was said before it."""
        return self._longest([*(when for when, _ in self.pieces), self.seconds])

    @property
    def longest_busy_silence(self) -> tuple[float, str]:
        """The same in processor seconds."""
        return self._longest(self.busy)

    def _longest(self, times: Sequence[float]) -> tuple[float, str]:
        before = ["(start)", *(text for _, text in self.pieces)]
        return max(
            (later - earlier, text[-160:]) for earlier, later, text in zip([0.0, *times], times, before, strict=False)
        )


def _busy(process: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    busy: list[float] = []
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
            busy.append(_busy(process.pid))
            pieces.append((time.monotonic() - started, data.decode(errors="replace")))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        os.close(reader)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    busy.append(busy[-1] if busy else 0.0)  # its children's are in `usage` too
    return Stamped(pieces, busy, time.monotonic() - started, process.returncode, usage.ru_utime)
