"""The map from functions to tests: which tests call which functions of the product, in any of their processes, and how long they take.

`record` runs test files with `site/sitecustomize.py` in every process and with this module as pytest's plugin. The map lies in
`reached.json.gz`; a later call records what it lacks: test files that are new, or have changed since.
"""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.rules.sources import CODE, name, python_files

from .draw import room_of
from .faults import HERE, ROOT, Fault, places

FILE = HERE / "reached.json.gz"
_RESULT = "tests.jsonl"
_TO_THE_END = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_FILES_A_RUN = 6  # test files that one pytest process records; the map is written after each


@dataclass
class ReachedMap:
    """The recorded map. `tests`: by node id, seconds and functions as "file::qualified name"; `files`: digests of test files."""

    tests: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = FILE) -> ReachedMap:
        """The committed map; an empty one where there is none."""
        if not path.exists():
            return cls()
        stored = json.loads(gzip.decompress(path.read_bytes()))
        names, rows = stored["functions"], stored["tests"].items()
        tests = {t: (seconds, frozenset(names[n] for n in accumulate(steps))) for t, (seconds, steps) in rows}
        return cls(tests, stored["files"])

    def write(self, path: Path = FILE) -> None:
        """Write the map, the same bytes for the same contents: numbers of functions as steps from the one before."""
        names = sorted({name for _, reached in self.tests.values() for name in reached})
        number, tests = {name: n for n, name in enumerate(names)}, {}
        for test, (seconds, reached) in sorted(self.tests.items()):
            numbers = sorted(number[name] for name in reached)
            tests[test] = [round(seconds, 2), [n - before for n, before in zip(numbers, [0, *numbers], strict=False)]]
        stored = {"files": dict(sorted(self.files.items())), "functions": names, "tests": tests}
        path.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), mtime=0))

    def put(self, file: str, tests: dict[str, tuple[float, frozenset[str]]]) -> None:
        """Take what was recorded of one test file in place of what was known."""
        self.tests = {test: row for test, row in self.tests.items() if test.split("::")[0] != file} | tests
        self.files[file] = _digest(ROOT / file)

    def lacking(self) -> list[str]:
        """Test files that are not recorded, or have changed since."""
        return [file for file in test_files() if self.files.get(file) != _digest(ROOT / file)]

    @functools.cached_property
    def _files_of(self) -> dict[str, set[str]]:
        return {test: {name.partition("::")[0] for name in reached} for test, (_, reached) in self.tests.items()}

    def enters(self, test: str, fault: Fault) -> bool:
        """True for a test that calls the fault's function; False for all at the top of a file."""
        return f"{fault.file}::{fault.function}" in self.tests[test][1]

    def tests_of(self, fault: Fault) -> list[tuple[str, float]]:
        """(node id, seconds) of the tests of a fault's file: first those that call its function.

        Among these, and among the others, tests in files named after the fault's come first, each quickest first.
        No call leads to what stands at the top of a file, so for that the tests of the room's folder are there too.
        """
        own = f"tests/unit/{room_of(fault.file).rpartition('/')[2]}/"
        named = f"/test_{Path(fault.file).stem}.py::"
        rows = [
            (not self.enters(test, fault), named not in test, seconds, test)
            for test, (seconds, _) in self.tests.items()
            if fault.file in self._files_of[test] or (not fault.function and test.startswith(own))
        ]
        return [(test, seconds) for *_, seconds, test in sorted(rows)]


def test_files() -> list[str]:
    """The test files that the default suite collects, but for those of this folder and the rules, which call little."""
    files = (name(path) for path in python_files("tests") if path.name.startswith("test_"))
    return [file for file in files if not file.startswith(("tests/mutations/", "tests/rules/"))]


def record(files: Sequence[str], jobs: int = 1) -> Iterator[tuple[str, int, float]]:
    """Record test files, `jobs` pytest processes at a time; (file, tests, seconds) of each file.

    The map is written after each process, and after an interrupt with the files that were recorded to their end.
    """
    groups = [files[start : start + _FILES_A_RUN] for start in range(0, len(files), _FILES_A_RUN)]
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        waiting = {}
        for some in groups:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            waiting[pool.submit(_run, some, folder, running)] = some, folder
        try:
            for future in as_completed(waiting):
                future.result()
                yield from _take(*waiting.pop(future))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            for some, folder in waiting.values():
                _take(some, folder)
            raise


def _take(files: Iterable[str], folder: Path) -> list[tuple[str, int, float]]:
    """Put those of a run's files that it has recorded to their end into the map; (file, tests, seconds) of each."""
    result = folder / _RESULT
    lines = result.read_text(encoding="utf-8").splitlines(keepends=True) if result.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    known, summary, by_file = ReachedMap.read(), [], defaultdict[str, list[Any]](list)
    for row in rows:
        by_file[row["test"].split("::")[0]].append(row)
    if by_file.pop("end", None):
        by_file |= {file: [] for file in files if file not in by_file}  # all their tests are slow
    elif by_file:
        by_file.popitem()  # the file at work when the run ended
    for file, of_file in by_file.items():
        tests = {row["test"]: (row["seconds"], frozenset(row["reached"])) for row in of_file if row["passed"]}
        known.put(file, with_fixtures(tests))
        summary.append((file, len(tests), sum(seconds for seconds, _ in tests.values())))
    known.write()
    return summary


def with_fixtures(tests: dict[str, tuple[float, frozenset[str]]]) -> dict[str, tuple[float, frozenset[str]]]:
    """A file's rows, with those of tests that call nothing themselves: they look at what a fixture of an earlier test has called."""
    everything = frozenset[str]().union(*(reached for _, reached in tests.values()))
    longest = max((seconds for seconds, _ in tests.values()), default=0.0)
    return {
        test: (seconds, reached) if reached else (longest, everything) for test, (seconds, reached) in tests.items()
    }


def _run(files: Iterable[str], folder: Path, running: list[subprocess.Popen[bytes]]) -> None:
    """Run pytest on test files with every process recorded; a file in `folder` gets a line for each test."""
    result = folder / _RESULT
    paths = [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"MMSPEED_REACHED": str(folder / "reached"), "MMSPEED_REACHED_ROOT": str(ROOT)}
    environment |= {"MMSPEED_REACHED_RESULT": str(result)}
    plain = ["-q", "-m", "not slow", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.mutations.reached"]
    command = [sys.executable, "-m", "pytest", *plain, *files]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        running.append(process)
        process.wait()
    if not result.exists():  # such as where a file could not be imported
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"pytest ended without a record:\n{text[-2000:]}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


# ---- pytest's plugin, in the process that records ----


class _Recorder:
    """Writes, after each test, what all its processes have called."""

    def __init__(self) -> None:
        self.log, self.result = Path(os.environ["MMSPEED_REACHED"]), Path(os.environ["MMSPEED_REACHED_RESULT"])
        self.seconds, self.passed = 0.0, True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        import sitecustomize

        sitecustomize.seen.clear()  # type: ignore[attr-defined]
        sitecustomize.begin()  # type: ignore[attr-defined]
        os.truncate(self.log, 0)
        self.seconds, self.passed = 0.0, True
        result = yield
        lines = set(self.log.read_text(encoding="utf-8").splitlines())
        reached = sorted({name for line in lines if (name := _function(line)) is not None})
        self._write(test=item.nodeid, seconds=self.seconds, passed=self.passed, reached=reached)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        self.passed = self.passed and report.passed  # skipped ones are left out too: they catch nothing

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in _TO_THE_END:
            self._write(test="end")

    def _write(self, **row: Any) -> None:
        with self.result.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record, where `record` has asked for it."""
    if "MMSPEED_REACHED_RESULT" in os.environ:
        config.pluginmanager.register(_Recorder())


def _function(line: str) -> str | None:
    """ "file::qualified name" of a recorded call; None for what is no function of the product."""
    path, _, number = line.partition("\t")
    parts = path.split(os.sep)
    if parts[0] == "mmspeed" and len(parts) > 1 and parts[1] in CODE:
        parts = parts[1:]  # through the link
    file = "/".join(parts)
    if parts[0] not in CODE or not file.endswith(".py") or not (ROOT / file).is_file():  # templates run, too
        return None
    function = _functions(file).get(int(number))
    return None if function is None else f"{file}::{function}"


@functools.cache
def _functions(file: str) -> dict[int, str]:
    """The innermost function that each line of a file belongs to, decorators included."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    by_line: dict[int, str] = {}
    for place in places(tree):  # outer before inner
        node = place.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            by_line |= dict.fromkeys(range(first, (node.end_lineno or first) + 1), place.owner)
    return by_line
