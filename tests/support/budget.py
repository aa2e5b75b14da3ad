"""Hold the default suite to its budget: each folder's share of the seconds that all tests take (`tests/budget.json`).

Shares are ratios within one run, so that a slow machine fails nothing. A folder may be half above its share and a hundredth of the suite
more, since processors, and other work on a machine, slow some tests more than others: one test of a small folder may double its seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parent.parent / "budget.json"
FREE = "free"  # seconds for the tests that come
NOISE = 0.5  # of a folder's own share
SLACK = 0.01  # of the whole suite


def read_budget() -> dict[str, float]:
    """The seconds of each folder on one core, and those that are free."""
    budget: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return budget


class Budget:
    """A plugin that sums the seconds of setup, call and teardown of tests by folder, in the process that all reports reach.

    A suite that passes and has a folder above its share fails.
    """

    def __init__(self, budget: Mapping[str, float]) -> None:
        self.budget = {folder: seconds for folder, seconds in budget.items() if folder != FREE}
        self.seconds: Counter[str] = Counter()

    def folder(self, test: str) -> str:
        """The innermost folder of the budget that holds a test; "" where none does."""
        return max((folder for folder in self.budget if test.startswith(f"{folder}/")), key=len, default="")

    def above(self) -> list[str]:
        """A line for each folder above its share, and for tests in none of the folders; none where only some folders ran."""
        if not self.budget.keys() <= self.seconds.keys():
            return []
        whole, allowed, lines = self.seconds.total(), sum(self.budget.values()), []
        for folder, seconds in sorted(self.seconds.items()):
            share, most = seconds / whole, self.budget.get(folder, 0.0) / allowed
            if share > most * (1 + NOISE) + SLACK:
                name = folder or "tests in folders that tests/budget.json does not name"
                lines.append(f"{name}: {share:.1%} of the suite's seconds, where its budget is {most:.1%}")
        return lines

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[self.folder(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.above():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        seconds = ", ".join(f"{folder or 'elsewhere'} {count:.0f}" for folder, count in self.seconds.most_common())
        terminalreporter.write_line(f"seconds by folder: {seconds}")
        for line in self.above():
            terminalreporter.write_line(
                f"ABOVE ITS BUDGET: {line}; make its tests cheaper, or run a cover of its cases"
            )
