"""Processes of cases: each case in one of its own, which ends with all that it started."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from pathlib import Path

from tests.faults.case import Case, Outcome, Scene

_SET_CHILD_SUBREAPER = 36  # of prctl: orphans of our processes become our children
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of whatever a dead descendant leaves behind, or leave it to others again."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents before their children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    below, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            below.append(child)
            waiting.append(child)
    return below


def end_tree(pid: int) -> None:
    """Kill a child of this process and all below it."""
    for each in [*descendants(pid), pid]:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


class RunningCase:
    """A case that runs in a forked process; its output is in `log.txt` beside its folder."""

    def __init__(self, case: Case, folder: Path, scene: Scene) -> None:
        self.case, self.folder = case, folder
        self.limit = case.limit(scene.full)
        self.began = time.monotonic()
        self.seconds = 0.0
        self._result = folder / "result.json"
        scene.folder.mkdir(parents=True)
        self.pid = os.fork()
        if self.pid == 0:
            self._run(scene)

    def _run(self, scene: Scene) -> None:
        code = 1
        try:
            os.setsid()
            adopt_orphans()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            descriptor = os.open(self.folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(scene.folder)
            try:
                figure, passed = self.case.run(scene)
            except BaseException as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                figure, passed = f"raised {type(error).__name__}: {lines[0][:200]}", False
            self._result.write_text(json.dumps([figure, bool(passed)]), encoding="utf-8")
            code = 0
        finally:
            for each in descendants(os.getpid()):
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            os._exit(code)

    def outcome(self) -> Outcome | None:
        """The figure and the verdict once the case has ended or is past its limit; None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        self.seconds = time.monotonic() - self.began
        if not done:
            if self.seconds <= self.limit:
                return None
            self.end()
            return f"hung: no result after {self.limit:.0f} s", False
        if self._result.exists():
            figure, passed = json.loads(self._result.read_text(encoding="utf-8"))
            return figure, passed
        return f"ended with exit code {os.waitstatus_to_exitcode(status)} and no result", False

    def end(self) -> None:
        """Kill the case and what it started."""
        end_tree(self.pid)
        os.waitpid(self.pid, 0)
