"""Logging for people and for programs: rank-aware lines, progress bars, and one `metrics.jsonl` always (law 8)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from mmspeed.redaction import redacted

Item = TypeVar("Item")
W = TypeVar("W", bound="Working")


def rank() -> int:
    """The rank of this process by the launcher's environment; 0 when no launcher started it."""
    return int(os.environ.get("RANK", "0"))


def get_logger(name: str) -> logging.Logger:
    """The package's logger of that name."""
    return logging.getLogger(name if name.startswith("mmspeed") else f"mmspeed.{name}")


class WorkHandler(logging.Handler):
    """A handler of the package's log that also shows the work under way: both on one console, lines above the bars."""

    shown: ShownWork


class _TerminalHandler(RichHandler, WorkHandler):
    """Lines above the bars of a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.shown.spoke()


class _LineHandler(logging.StreamHandler, WorkHandler):  # type: ignore[type-arg]
    """Plain lines."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.shown.spoke()


class _Redacting(logging.Formatter):
    """Lines without secrets, those of tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def setup() -> None:
    """Send the package's log to standard error: rank 0 at INFO, the others at WARNING with their rank."""
    root = logging.getLogger("mmspeed")
    root.handlers.clear()
    root.propagate = False
    console = Console(stderr=True)
    handler: WorkHandler
    if console.is_terminal:
        handler = _TerminalHandler(
            console=console, show_path=False, show_level=False, markup=False, highlighter=NullHighlighter()
        )
        handler.setFormatter(_Redacting("%(message)s", datefmt="[%X]"))
    else:
        handler = _LineHandler(sys.stderr)
        prefix = "" if rank() == 0 else f"[rank {rank()}] "
        handler.setFormatter(_Redacting(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    handler.shown = ShownWork(console)
    root.addHandler(handler)
    root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)


class Working:
    """Work under way, as a context manager: on a terminal a spinner with its seconds, in a log a line for every silence.

    The line of `label` comes at once; with `tell=False` only when the work lasts. Nothing is shown on ranks other than 0.
    """

    total: int | None = None
    counts = False

    def __init__(self, label: str, tell: bool = True) -> None:
        self.label, self.tell = label, tell
        self.done = 0
        self.started = time.monotonic()
        self._shown: ShownWork | None = None

    def __enter__(self: W) -> W:
        self.started = time.monotonic()
        if rank() == 0:
            if self.tell:
                get_logger("work").info(self.label)
            self._shown = _shown_work()
            self._shown.begin(self)
        return self

    def __exit__(self, *exc: object) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.end(self)

    @property
    def seconds(self) -> float:
        """Seconds since its beginning."""
        return time.monotonic() - self.started

    def figures(self) -> str:
        """The text shown behind its label."""
        return ""

    def line(self) -> str:
        """The line that a log says of it."""
        return f"{self.label}: {format_seconds(self.seconds)}"


class ProgressLine(Working):
    """Work that is counted: a bar with rate and remaining time on a terminal; in a log a plain line for every silence.

    Use as a context manager; `advance` may be called from any thread.
    """

    counts = True

    def __init__(self, label: str, total: int | None, unit: str = "it", start: int = 0) -> None:
        super().__init__(label, tell=False)
        self.total, self.unit = total, unit
        self.done = self.first = start
        self.note = ""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more as done; `note` is shown behind the bar."""
        self.done += count
        self.note = note or self.note
        if self._shown is not None:
            self._shown.moved(self)

    def figures(self) -> str:
        """Its count, rate, remaining time and note."""
        seconds = self.seconds
        rate = (self.done - self.first) / seconds if seconds > 0 else 0.0
        of = f"/{self.total}" if self.total else ""
        left = ""
        if self.total and rate > 0 and self.done < self.total:
            left = f", {format_seconds((self.total - self.done) / rate)} left"
        return f"{self.done}{of} {self.unit}, {rate:.2f} {self.unit}/s{left}{'  ' + self.note if self.note else ''}"

    def line(self) -> str:
        return f"{self.label}: {self.figures()}"

    def __exit__(self, *exc: object) -> None:
        if self._shown is not None and not self._shown.console.is_terminal:
            get_logger("progress").info(self.line())
        super().__exit__(*exc)


class ShownWork:
    """The work under way in this process, the innermost last, as bars on a terminal or as lines of the log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._open: list[Working] = []
        self._bars: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._spoke = time.monotonic()

    def spoke(self) -> None:
        """Note that a line was written now."""
        self._spoke = time.monotonic()

    def begin(self, work: Working) -> None:
        """Show this work from now on."""
        with self._lock:
            self._open.append(work)
            if self.console.is_terminal:
                if self._bars is None:
                    self._bars = _bars(self.console)
                    self._bars.start()
                self._tasks[id(work)] = self._bars.add_task(
                    work.label, total=work.total, completed=work.done, work=work
                )
            elif len(self._open) == 1:
                self._ended = threading.Event()
                threading.Thread(target=self._speak, args=(self._ended,), name="mmspeed-log", daemon=True).start()

    def moved(self, work: Working) -> None:
        """Show the work's new count."""
        if self._bars is not None and id(work) in self._tasks:
            self._bars.update(self._tasks[id(work)], completed=work.done)

    def end(self, work: Working) -> None:
        """Show this work no longer; a bar that counted stays on the terminal as it ended."""
        with self._lock:
            self._open.remove(work)
            task = self._tasks.pop(id(work), None)
            if self._bars is not None and task is not None:
                last = not self._open
                if not work.counts:
                    self._bars.remove_task(task)
                elif not last:
                    self._bars.stop_task(task)
                    self._bars.remove_task(task)
                if last:
                    bars, self._bars = self._bars, None
                    bars.stop()
            if not self._open:
                self._ended.set()

    def _speak(self, ended: threading.Event) -> None:
        """Write a line of the innermost work whenever the log was silent for too long."""
        while not ended.wait(LOOK_SECONDS):
            with self._lock:
                if ended.is_set() or not self._open:
                    return
                work = self._open[-1]
                if time.monotonic() - self._spoke >= SILENCE_SECONDS:
                    self.spoke()
                    get_logger("progress").info(work.line())


LOOK_SECONDS = 0.2  # between two looks for silence
SILENCE_SECONDS = 10.0  # without a line, after which a log has one of the work under way


def _bars(console: Console) -> Progress:
    """The bars of a terminal. Output of the process, which would break them, is written above; not where it goes elsewhere."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _Bar(bar_width=20),
        TimeElapsedColumn(),
        _Figures(),
        console=console,
        redirect_stdout=sys.stdout.isatty(),
    )


class _Bar(BarColumn):
    """The bar of work that is counted."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.fields["work"].counts else Text("")


class _Figures(ProgressColumn):
    """The figures of the work behind its bar, as a log would write them."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))

    def render(self, task: Task) -> Text:
        return Text(task.fields["work"].figures(), no_wrap=True, overflow="ellipsis")


def _shown_work() -> ShownWork:
    """That of the log's handler; one of its own for a program that has set up its own log."""
    for handler in logging.getLogger("mmspeed").handlers:
        if isinstance(handler, WorkHandler):
            return handler.shown
    return ShownWork(Console(stderr=True))


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
        self._file.write(json.dumps(_strict(fields)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _strict(value: Any) -> Any:
    """A value of JSON with null for each number that is not finite."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; lines that no run writes, and one cut off by a kill, are left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [row for row in map(metrics_row, lines) if row is not None]


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """The row of a line of `metrics.jsonl`; None for a line that no run writes.

    It is a JSON object whose `step`, which each kind has, is a whole number, and whose `loss`, which training has, is a number or null.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step", None if "kind" in row else 0)) is not int:
        return None
    loss = row.get("loss", "" if row.get("kind") == "train" else None)
    return row if loss is None or isinstance(loss, int | float) else None
