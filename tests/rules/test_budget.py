"""The budget of the default suite's seconds: 12 minutes on two cores, of which 2 are free; a folder above its share fails the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.budget import FREE, Budget, read_budget

CORES = 2


def test_the_budget_names_folders_and_leaves_time_free() -> None:
    budget = read_budget()
    assert budget[FREE] == CORES * 2 * 60 and sum(budget.values()) == CORES * 12 * 60
    assert [folder for folder in budget if folder != FREE and not (ROOT / folder).is_dir()] == []


def test_every_test_is_in_a_folder_of_the_budget() -> None:
    budget = Budget(read_budget())
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [file for file in files if not budget.folder(file)] == []


def reported(seconds: dict[str, float]) -> Budget:
    budget = Budget({"tests/a": 10, "tests/a/b": 10, "tests/c": 20, FREE: 100})
    for test, duration in seconds.items():
        budget.pytest_runtest_logreport(SimpleNamespace(nodeid=test, duration=duration))
    return budget


@pytest.mark.parametrize(
    ("seconds", "above"),
    [
        ({"tests/a/test_x.py::t": 1, "tests/a/b/test_y.py::t": 1, "tests/c/test_z.py::t": 2}, []),
        ({"tests/a/test_x.py::t": 1, "tests/a/b/test_y.py::t": 2, "tests/c/test_z.py::t": 2}, ["tests/a/b"]),
        ({"tests/a/test_x.py::t": 60, "tests/a/b/test_y.py::t": 0, "tests/c/test_z.py::t": 60}, ["tests/a"]),
        # 38.5 % is the most that a share of 25 % may take
        ({"tests/a/test_x.py::t": 37.9, "tests/a/b/test_y.py::t": 1, "tests/c/test_z.py::t": 61.1}, []),
        ({"tests/a/test_x.py::t": 39.1, "tests/a/b/test_y.py::t": 1, "tests/c/test_z.py::t": 59.9}, ["tests/a"]),
        ({"tests/a/test_x.py::t": 60, "tests/c/test_z.py::t": 60}, []),  # a part of the suite
        (
            {"tests/a/test_x.py::t": 1, "tests/a/b/test_y.py::t": 1, "tests/c/test_z.py::t": 1, "tests/d/t.py::t": 1},
            ["tests in folders"],
        ),
    ],
)
def test_a_folder_above_its_share_fails_a_run_that_passed(seconds: dict[str, float], above: list[str]) -> None:
    budget = reported(seconds)
    assert len(budget.above()) == len(above)
    assert all(line.startswith(name) for line, name in zip(budget.above(), above, strict=True))
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    budget.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if above else pytest.ExitCode.OK)
