"""Logging for people and for programs: rank-aware lines, progress bars, and one `metrics.jsonl` always (law 8)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")


def rank() -> int:
    """The rank of this process by the launcher's environment; 0 when no launcher started it."""
    return int(os.environ.get("RANK", "0"))


def get_logger(name: str) -> logging.Logger:
    """The package's logger of that name."""
    return logging.getLogger(name if name.startswith("mmspeed") else f"mmspeed.{name}")


def setup(verbose: bool = False) -> None:
    """Send the package's log to standard error: rank 0 at INFO, the others at WARNING with their rank."""
    root = logging.getLogger("mmspeed")
    root.handlers.clear()
    root.propagate = False
    console = Console(stderr=True)
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, markup=False, highlighter=None)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        prefix = "" if rank() == 0 else f"[rank {rank()}] "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    level = logging.DEBUG if verbose else (logging.INFO if rank() == 0 else logging.WARNING)
    root.setLevel(level)


class ProgressLine:
    """A progress bar with rate and remaining time on a terminal; plain lines, at most one in `every` seconds, in a log.

    Use as a context manager; `advance` may be called from any thread.
    """

    def __init__(self, label: str, total: int | None, unit: str = "it", every: float = 10.0, start: int = 0) -> None:
        self.label, self.total, self.unit, self.every = label, total, unit, every
        self.done = self.first = start
        self.note = ""
        self._shown = self._started = time.monotonic()
        self._log = get_logger("progress")
        self._bar: Progress | None = None
        self._silent = rank() != 0

    def __enter__(self) -> ProgressLine:
        self._started = self._shown = time.monotonic()
        console = Console(stderr=True)
        if console.is_terminal and not self._silent:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done, note="")
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more as done; `note` is shown behind the bar."""
        self.done += count
        self.note = note or self.note
        if self._bar is not None:
            self._bar.update(self._task, advance=count, note=self.note)
        elif not self._silent and time.monotonic() - self._shown >= self.every:
            self._shown = time.monotonic()
            self._log.info(self._line())

    def _line(self) -> str:
        seconds = time.monotonic() - self._started
        rate = (self.done - self.first) / seconds if seconds > 0 else 0.0
        of = f"/{self.total}" if self.total else ""
        left = ""
        if self.total and rate > 0 and self.done < self.total:
            left = f", {format_seconds((self.total - self.done) / rate)} left"
        return f"{self.label}: {self.done}{of} {self.unit}, {rate:.2f} {self.unit}/s{left}{'  ' + self.note if self.note else ''}"

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._silent:
            self._log.info(self._line())


def progress(items: Iterable[Item], label: str, total: int | None = None, unit: str = "it") -> Iterator[Item]:
    """Iterate with a `ProgressLine`."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with ProgressLine(label, total, unit) as line:
        for item in items:
            yield item
            line.advance()


def format_seconds(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def format_bytes(count: float) -> str:
    """`512 B`, `3.1 MB`, `2.0 GB` in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_figure(value: float) -> str:
    """`1,234.5`, `0.0312`: a decimal, or three digits of a small number."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


class MetricsLog:
    """Appends one JSON object a line to `metrics.jsonl`; non-finite numbers are written as null (strict JSON has none)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (held open for the run)

    def write(self, **fields: Any) -> None:
        clean = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in fields.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; lines that are no JSON object, such as one cut off by a kill, are left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows
