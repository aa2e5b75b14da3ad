"""Runs chosen tests in their order, in rounds that grow, in one process: `python -m tests.mutations.batches ORDER REPORT HANG_SECONDS`.

ORDER holds [node id, seconds] pairs. REPORT names, while the run goes on, which test is at work, how many passed, and what failed first.
Each round collects its own files alone, so that a fault that the quickest tests catch costs no collection of the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FIRST_SECONDS = 5.0  # of the first round, as recorded; each later one has twice as much


def rounds(order: Sequence[tuple[str, float]], first: float = FIRST_SECONDS) -> Iterator[list[str]]:
    """The tests in their order, cut where a round's recorded seconds are spent."""
    some: list[str] = []
    spent, most = 0.0, first
    for test, seconds in order:
        some.append(test)
        spent += seconds
        if spent >= most:
            yield some
            some, spent, most = [], 0.0, most * 2
    if some:
        yield some


class Chosen:
    """Pytest's plugin that leaves the tests of one round, in their order, and keeps the report."""

    def __init__(self, report: Path) -> None:
        self.path, self.wanted = report, {}
        self.state: dict[str, Any] = {"passed": 0, "running": None, "failed": None, "why": ""}

    def choose(self, tests: Sequence[str]) -> None:
        """Take the tests of a round."""
        self.wanted: dict[str, int] = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.wanted]
        items[:] = sorted(chosen, key=lambda item: self.wanted[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(running=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.state["failed"] is None:
            self._note(failed=report.nodeid, why=_last_line(report))
        elif report.when == "call" and report.passed:
            self._note(passed=self.state["passed"] + 1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.state["failed"] is None:
            self._note(failed=f"{report.nodeid or 'collection'} (import)", why=_last_line(report))

    def _note(self, **changes: Any) -> None:
        self.state |= changes
        self.path.write_text(json.dumps(self.state), encoding="utf-8")

    def finish(self, code: int) -> None:
        """Note that all rounds have ended, or that pytest itself failed with `code`."""
        if code not in (0, 1, 5) and self.state["failed"] is None:
            self._note(failed=f"pytest ended with code {code}")
        self._note(ended=True)


def _last_line(report: Any) -> str:
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return lines[0][1:].strip()[:200] if lines else report.longreprtext.strip()[-200:]


def main(order: str, report: str, hang: str) -> int:
    """Run the rounds until one fails; the exit code of pytest."""
    chosen, code = Chosen(Path(report)), 0
    plain = ["-q", "-x", "-m", "not slow", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    for tests in rounds(json.loads(Path(order).read_text(encoding="utf-8"))):
        chosen.choose(tests)
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        files = [file for file in files if Path(file).exists()]  # the map may be older than the tests
        code = int(pytest.main([*plain, "-o", f"faulthandler_timeout={hang}", *files], plugins=[chosen]))
        if code not in (0, 5):
            break
    chosen.finish(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
