"""Run checks one after the other within a time limit; their outcomes as rows, table, JSON and verdict."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mmspeed.device import Device

# passed; failed: wrong results or an error; short: right but below its goal; skipped: no time; absent: not for this device
State = Literal["passed", "failed", "short", "skipped", "absent"]
WORDS: dict[State, str] = {"passed": "ok", "failed": "FAILED", "short": "SHORT", "skipped": "skipped", "absent": "-"}
BAD: tuple[State, ...] = ("failed", "short", "skipped")
LONGEST_ERROR = 300  # characters
NO_TIME = "no time left"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check: its state, a line for people, figures for programs."""

    state: State
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check that has not run yet. `seconds`: about as long as it takes; with less time left it is skipped."""

    part: str
    name: str
    run: Callable[[], Outcome]
    seconds: float = 1.0


@dataclass(frozen=True)
class QualifyRow:
    """The row of a check."""

    part: str
    name: str
    state: State
    text: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QualifyResult:
    """All rows, and the machine that they are of. `hung`: a check had not ended at the time limit, and its thread still runs."""

    device: str
    kind: str
    versions: dict[str, str]
    minutes: float
    seconds: float
    rows: list[QualifyRow]
    hung: bool = False

    def passed(self) -> bool:
        """True where every check of this device ran, was right and reached its goal."""
        return all(row.state not in BAD for row in self.rows) and any(row.state == "passed" for row in self.rows)

    def shortfalls(self) -> list[str]:
        """The rows that keep the device from passing, as lines."""
        return [f"{row.part}: {row.name}: {WORDS[row.state]}: {row.text}" for row in self.rows if row.state in BAD]

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.device} ({self.kind}); {versions}"]
        width = max((len(row.name) for row in self.rows), default=0)
        for part in dict.fromkeys(row.part for row in self.rows):
            lines.append(f"{part}:")
            of_part = [row for row in self.rows if row.part == part]
            lines += [f"  {WORDS[row.state]:<8}{row.name:<{width}}  {row.text}" for row in of_part]
        counts = {state: sum(row.state == state for row in self.rows) for state in WORDS}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        lines.append(f"{summary}; {self.seconds:.0f} s of {60 * self.minutes:.0f} s")
        if self.passed():
            return [*lines, "PASS"]
        return [*lines, "FAIL:", *(f"  {text}" for text in self.shortfalls() or ["nothing ran"])]

    def to_json(self) -> str:
        """All rows and the verdict as JSON."""
        body = {"passed": self.passed(), "shortfalls": self.shortfalls()} | asdict(self)
        return json.dumps(body, indent=2)


def run_checks(
    checks: Sequence[Check], device: Device, deadline: float, progress: Callable[[str], None] = lambda text: None
) -> tuple[list[QualifyRow], bool]:
    """The rows of the checks, in their order, and True where one had not ended at `deadline` (of `time.monotonic`).

    They run in a thread of their own, since a kernel that hangs cannot be interrupted; such a thread is left behind.
    """
    rows: list[QualifyRow] = []

    def work() -> None:
        device.activate()  # the current device is a thread's own
        for check in checks:
            rows.append(run_check(check, device, deadline, progress))

    thread = threading.Thread(target=work, name="qualify", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(max(0.0, deadline - began))
    hung = thread.is_alive()
    ended = list(rows)
    if len(ended) == len(checks):
        return ended, False
    used = time.monotonic() - began - sum(row.seconds for row in ended)
    text = f"had not ended after {used:.0f} s, at the time limit" if hung else "the device could not be used"
    running, *waiting = checks[len(ended) :]
    ended.append(QualifyRow(running.part, running.name, "failed", text, used))
    ended += [QualifyRow(check.part, check.name, "skipped", NO_TIME, 0.0) for check in waiting]
    return ended, hung


def run_check(check: Check, device: Device, deadline: float, progress: Callable[[str], None]) -> QualifyRow:
    """The row of a check: skipped when the time left is less than it takes, failed with the error that it raises."""
    began = time.monotonic()
    if began + check.seconds > deadline:
        return QualifyRow(check.part, check.name, "skipped", NO_TIME, 0.0)
    progress(f"{check.part}: {check.name}")
    try:
        outcome = check.run()
    except (Exception, SystemExit) as error:  # whatever a driver or a compiler raises is this row's failure alone
        outcome = Outcome("failed", error_text(error))
    if outcome.state == "failed" or device.kind != "cpu":
        _forget(device)
    seconds = time.monotonic() - began
    return QualifyRow(check.part, check.name, outcome.state, outcome.text, seconds, outcome.figures)


def error_text(error: BaseException) -> str:
    """An error as one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= LONGEST_ERROR else words[:LONGEST_ERROR] + " ..."


def _forget(device: Device) -> None:
    """Give back the memory of a check; a device whose context is broken cannot even do that."""
    gc.collect()
    try:
        device.empty_cache()
    except RuntimeError:
        return
