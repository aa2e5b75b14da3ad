"""Injects faults one at a time, each in a copy of the tree, and runs the tests of its file until one fails.

A fault is caught by a test that fails; by a hang or a crash only where the suite names the test: pytest's `faulthandler_timeout` ends the
process and prints where it stood. A catching test is run once more without the fault, and where it fails there too, it counts for nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.rules.sources import CODE, name, python_files

from .faults import HERE, ROOT, Fault, apply, line_of
from .reached import FILE, ReachedMap

_MARK = "MMSPEED_FAULT"  # in the environment of all processes of one fault
_TEST_IN_TRACE = re.compile(r'File "[^"]*/(tests/[^"]*\.py)", line \d+ in (test_\w+)')
_TRIES = 3  # of tests that fail without the fault too
_mtimes = itertools.count(1_000_000_000)  # of a file's own for each change: compiled code is chosen by it and the size


@dataclass(frozen=True)
class Limits:
    """Seconds: of a fault's tests all together, and of one test until it counts as a hang."""

    fault: float = 120.0
    hang: float = 45.0


@dataclass
class Verdict:
    """The result of a fault. `test`: the test that caught it; None: it escaped, `why` says how."""

    id: str
    kind: str
    place: str
    test: str | None
    why: str
    seconds: float
    passed: int = 0  # tests that did not see it
    unfit: list[str] = field(default_factory=list)  # tests that fail without the fault too

    def line(self) -> str:
        """A row of the table."""
        caught = f"caught by {self.test}" if self.test else f"ESCAPED: {self.why}"
        return f"{self.id:<4} {self.place:<58} {self.kind[:48]:<48} {self.seconds:6.1f} s  {caught}"


def tree_digest() -> str:
    """The digest of the sources, the tests, and the map that says which are run."""
    digest = hashlib.sha256(FILE.read_bytes() if FILE.exists() else b"")
    for path in sorted(python_files(*CODE, "tests")):
        if path.parent != HERE:
            digest.update(name(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy what git knows of or does not ignore; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    for file in filter(None, listed.stdout.decode().split("\0")):
        source, to = root / file, target / file
        if source.exists() or source.is_symlink():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to, follow_symlinks=False)


class Tree:
    """A copy of the repository `source`, in which one file at a time is changed. Used by one thread."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        self.source, self.root = source, folder / "tree"
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        copy_tree(self.root, source)

    def write(self, file: str, text: str) -> None:
        """Give a file other contents; no compiled code of earlier ones is taken for it."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        at = next(_mtimes)
        os.utime(path, (at, at))

    def stop(self) -> None:
        """End the run at work; a later one does nothing."""
        self._stopped = True
        if self._running is not None and self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGKILL)

    def run(self, tests: Sequence[tuple[str, float]], limits: Limits, mark: str) -> tuple[str | None, str, int]:
        """(test that failed or None, what it said or why none did, how many passed) of tests in their order."""
        if self._stopped:
            return None, "stopped", 0
        with tempfile.TemporaryDirectory() as scratch:
            order, report, errors = (Path(scratch) / name for name in ("order.json", "report.json", "errors"))
            order.write_text(json.dumps(list(tests)), encoding="utf-8")
            environment = os.environ | {"PYTHONPATH": str(self.root), "TMPDIR": scratch, _MARK: mark}
            environment |= {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.mutations.batches", str(order), str(report), str(limits.hang)]
            with errors.open("wb") as sink:
                process = self._running = subprocess.Popen(
                    command, cwd=self.root, env=environment, stdout=sink, stderr=sink, start_new_session=True
                )
            try:
                process.wait(limits.fault)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end_processes(process, mark)
            state = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
            return _judged(state, late, errors.read_text(encoding="utf-8", errors="replace"), limits)


def _judged(state: dict[str, object], late: bool, output: str, limits: Limits) -> tuple[str | None, str, int]:
    passed = int(str(state.get("passed", 0)))
    if state.get("failed"):
        return str(state["failed"]), str(state.get("why", "")), passed
    if late:
        return None, f"{limits.fault:.0f} s were over at {state.get('running')}", passed
    if state.get("ended"):
        return None, "all of its tests passed", passed
    named = [f"{file}::{test}" for file, test in _TEST_IN_TRACE.findall(output)]
    running = str(state.get("running"))
    if any(running.startswith(name) for name in named):
        how = "hangs" if "Timeout (" in output else "crashes"
        return running, how, passed
    return None, f"the process ended, and nothing names the test: {output.strip()[-150:]}", passed


def end_processes(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a run's processes: its session, and those that left it, which the mark in their environment names."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for other in psutil.process_iter():
        try:
            if other.environ().get(_MARK) == mark:
                other.kill()
        except (psutil.Error, OSError):
            continue


def try_fault(tree: Tree, fault: Fault, reached: ReachedMap, limits: Limits, sound: dict[str, bool]) -> Verdict:
    """Inject one fault into a copy, and run its tests. `sound`: what is known of tests without any fault, shared."""
    source = (tree.source / fault.file).read_text(encoding="utf-8")
    began, tests, unfit = time.monotonic(), reached.tests_of(fault), []
    place = f"{fault.file}:{line_of(fault, source)}"
    mark = f"{os.getpid()} {tree.root} {fault.id}"

    def verdict(test: str | None, why: str, passed: int = 0) -> Verdict:
        return Verdict(fault.id, fault.kind, place, test, why, round(time.monotonic() - began, 1), passed, unfit)

    if not tests:
        return verdict(None, "no recorded test calls this file")
    while tests and len(unfit) < _TRIES:
        left = Limits(max(1.0, limits.fault - (time.monotonic() - began)), limits.hang)
        tree.write(fault.file, apply(fault, source))
        try:
            test, why, passed = tree.run(tests, left, mark)
        finally:
            tree.write(fault.file, source)
        if test is None and not reached.enters(tests[0][0], fault):
            why += "; no recorded test calls the function itself"
        if test is None or test not in dict(tests):  # an import that fails names no test of the map
            return verdict(test, why, passed)
        if test not in sound:
            sound[test] = tree.run([(test, 0.0)], Limits(limits.fault, limits.hang), mark)[0] is None
        if sound[test]:
            return verdict(test, why, passed)
        unfit.append(test)
        tests = [row for row in tests if row[0] != test]
    return verdict(None, "its tests fail without it too", passed)


class Results:
    """Verdicts in a file that is written after each fault, so that an interrupted run goes on where it was.

    Those of another tree, map or fault of the same name are not gone on with.
    """

    def __init__(self, file: Path, again: bool = False) -> None:
        self.file, self._lock = file, threading.Lock()
        self._tree = tree_digest()
        self.rows: dict[str, Verdict] = {}  # by the fault's whole text
        if file.exists() and not again:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["tree"] == self._tree:
                self.rows = {key: Verdict(**row) for key, row in stored["verdicts"].items()}

    def of(self, fault: Fault) -> Verdict | None:
        """The verdict of a fault that was tried before."""
        return self.rows.get(_key(fault))

    def put(self, fault: Fault, verdict: Verdict) -> None:
        """Take and write a verdict."""
        with self._lock:
            self.rows[_key(fault)] = verdict
            self.file.parent.mkdir(parents=True, exist_ok=True)
            stored = {"tree": self._tree, "verdicts": {key: asdict(row) for key, row in self.rows.items()}}
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.file)


def _key(fault: Fault) -> str:
    return json.dumps(fault.stored(), sort_keys=True)


def try_all(
    faults: Sequence[Fault], results: Results, jobs: int, limits: Limits, report: Callable[[Verdict], None]
) -> list[Verdict]:
    """The verdicts of all faults, in their order, `jobs` faults at a time. An interrupt ends what runs; its faults have no verdict."""
    reached, sound, mine = ReachedMap.read(), dict[str, bool](), threading.local()
    reached.tests_of(faults[0])  # its index is computed once, before the threads start
    trees: list[Tree] = []
    stopped = threading.Event()

    def one(fault: Fault, scratch: Path) -> None:
        verdict = results.of(fault)
        if verdict is None:
            if not hasattr(mine, "tree"):
                mine.tree = Tree(Path(tempfile.mkdtemp(dir=scratch)))
                trees.append(mine.tree)
            verdict = try_fault(mine.tree, fault, reached, limits, sound)
            if stopped.is_set():
                return
            results.put(fault, verdict)
        report(verdict)

    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch, ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, fault, Path(scratch)) for fault in faults]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.stop()
            raise
    return [verdict for fault in faults if (verdict := results.of(fault)) is not None]
