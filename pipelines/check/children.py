"""Run child processes: start them, wait for them, and end them with this process.

A child reads its job as one line of JSON on standard input, which stays open: when that ends, the parent is gone (`follow_parent`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError
from mmspeed.guards import end_with_parent

GRACE_SECONDS = 3.0  # after the first failure, for the others to report theirs
ERROR = "error"  # key of a job: the file that a child writes its error to

# variables of launchers in the environment, with which a child would take itself for one of theirs
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "MMSPEED_LAUNCHED")


class ChildError(Exception):
    """A child's own traceback, as the cause of the error that reports it."""


@dataclass(frozen=True)
class Child:
    """A process to start: its name in messages, its command, and its job."""

    name: str
    command: Sequence[str]
    job: dict[str, Any]


def run_children(children: Sequence[Child], threads: int) -> None:
    """Run all to their end, each with so many threads. They end when this process does, however that happens.

    The first failure ends the others. Raises UserError that names the process and the cause, or repeats the process's own UserError.
    """
    with tempfile.TemporaryDirectory(prefix="mmspeed-") as folder, contextlib.ExitStack() as stack:
        errors = [Path(folder) / f"{number}.json" for number in range(len(children))]
        outputs = [stack.enter_context(open(path.with_suffix(".txt"), "w+b")) for path in errors]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for child, error, output in zip(children, errors, outputs, strict=True):
                processes.append(_start(child, error, output, threads))
            while any(codes := [process.poll() for process in processes]) or None in codes:
                if any(codes):
                    _settle(processes)
                    raise _failure(children, processes, errors, outputs)
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
                with contextlib.suppress(OSError):
                    process.stdin.close()  # type: ignore[union-attr]


def follow_parent() -> None:
    """Make a child that has read its job end when its standard input does."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock an exit would wait for
            pass
        os._exit(1)

    end_with_parent()
    threading.Thread(target=watch, name="mmspeed-parent", daemon=True).start()


def write_error(path: str, error: BaseException, trace: str) -> None:
    """Write an error to the file that the parent reads."""
    text = str(error).strip().split("\n")[0]
    known = isinstance(error, UserError)
    content = {"text": str(error) if known else f"{type(error).__name__}: {text}", "known": known, "trace": trace}
    part = Path(path).with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)


def _start(child: Child, error: Path, output: Any, threads: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        child.command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,  # Ctrl-C is this process's to handle
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # one that is gone already is reported by its exit code
        process.stdin.write(json.dumps({**child.job, ERROR: str(error)}).encode() + b"\n")
        process.stdin.flush()
    return process


def _settle(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end and None in [process.poll() for process in processes]:
        time.sleep(0.02)


def _failure(
    children: Sequence[Child],
    processes: Sequence[subprocess.Popen[bytes]],
    errors: Sequence[Path],
    outputs: Sequence[Any],
) -> UserError:
    """The cause among the failures: a killed process, else a UserError, else the earliest error."""
    failures = []
    for child, process, error, output in zip(children, processes, errors, outputs, strict=True):
        if not process.returncode:
            continue
        if error.exists():
            report = json.loads(error.read_text(encoding="utf-8"))
            order = (1 if report["known"] else 2, error.stat().st_mtime)
        else:
            output.seek(0)
            trace = output.read().decode(errors="replace")
            report = {"text": _ending(process.returncode, trace), "known": False, "trace": trace}
            order = (0, 0.0)
        failures.append((order, child.name, report))
    _, name, report = min(failures, key=lambda one: one[0])
    failure = UserError(report["text"] if report["known"] else f"{name} failed: {report['text']}")
    failure.__cause__ = ChildError(report["trace"])
    return failure


def _ending(code: int, output: str) -> str:
    if code >= 0:
        last = output.strip().splitlines()[-1:] or ["it said nothing"]
        return f"it ended with exit code {code}; {last[0]}"
    hint = "; often the machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{hint}"
