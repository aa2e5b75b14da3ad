"""Share the work of a run between its processes: of importing tests, and of running those that go together."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = "tests/rules/"  # they share syntax trees of all files, which take each process 10 s


class RulesTogether(LoadScopeScheduling):
    """xdist's `--dist loadscope`, a file at a time, with the rules as one."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


def import_share(config: pytest.Config, tests: Path) -> None:
    """Import this process's part of all test files, before all are collected.

    pytest rewrites the assertions of a file that it meets for the first time, and stores the result; processes that collect at once
    would each rewrite all files of a fresh checkout, which takes 20 s. What fails to import fails again when it is collected.
    """
    if [Path(each).resolve() for each in config.args] != [tests]:
        return  # few files
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]  # type: ignore[attr-defined]
    for path in sorted(tests.rglob("test_*.py"))[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))
