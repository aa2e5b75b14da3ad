"""The faults have their places in the sources, and the tool counts a fault as caught only where a test is named."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from .__main__ import ARGUMENTS, lost_anchors
from .batches import rounds
from .draw import NOT_RUN, shares, source_files, write
from .faults import LISTS, ROOT, Fault, LostAnchorError, all_faults, apply, load
from .mend import _nearest
from .operators import OPERATORS, sites
from .reached import ReachedMap
from .run import Limits, Results, Tree, Verdict, _judged, try_fault

SOURCE = '''
def add(values, most, start=0):
    """A docstring with 1 + 1."""
    total = start
    for value in values:
        if value < most and not total > 9:
            total += value
        else:
            values.discard(value, most, keep=True)
            return total
    self.total = total
    raise ValueError(f"{total + 1} is more than {most}", 1)


class Sum:
    def __repr__(self):
        return 1 + 1

    def add(self, values):
        log.info("%d", 1 + 1)
        self.last = values
        return 2 * 3
'''


def test_every_fault_has_its_place() -> None:
    assert lost_anchors(all_faults()) == [], (
        "run `python -m tests.mutations anchors --mend`, and mend those by hand that it names"
    )


def test_lists_hold_at_least_thirty_each_and_none_twice() -> None:
    for path in LISTS.values():
        assert len(load(path)) >= 30
    faults = all_faults()
    assert len({fault.id for fault in faults}) == len(faults)
    for file, some in itertools.groupby(sorted(faults, key=lambda fault: fault.file), key=lambda fault: fault.file):
        source = (ROOT / file).read_text(encoding="utf-8")
        changed = [apply(fault, source) for fault in some]
        assert len(set(changed)) == len(changed), file


def test_drawn_faults_are_of_operators_and_of_code_that_runs() -> None:
    drawn = load(LISTS["drawn"])
    assert {fault.kind for fault in drawn} <= set(OPERATORS) and not {fault.file for fault in drawn} & NOT_RUN.keys()
    assert NOT_RUN.keys() <= set(source_files())


def test_arguments_are_of_faults() -> None:
    assert json.loads(ARGUMENTS.read_text(encoding="utf-8")).keys() <= {fault.id for fault in all_faults()}


def test_shares_round_up_the_largest_remainders() -> None:
    assert shares({"a": 70, "b": 19, "c": 11}, 10) == {"a": 7, "b": 2, "c": 1}


def test_operators_leave_texts_alone_and_every_change_applies() -> None:
    changes = sites("x.py", SOURCE)
    counts = Counter(fault.kind for fault in changes)
    assert counts.pop("off by one") == 4 and counts.pop("comparison") == counts.pop("dropped assignment") == 2
    assert counts == dict.fromkeys(set(OPERATORS) - {"off by one", "comparison", "dropped assignment"}, 1)
    for fault in changes:
        assert ast.dump(ast.parse(apply(fault, SOURCE))) != ast.dump(ast.parse(SOURCE))


def test_anchors_outlive_other_lines_and_formatting() -> None:
    fault = Fault("x", "", "x.py", "add", "if value < most and (not total > 9):", "value < most", "value <= most")
    moved = SOURCE.replace(
        "value < most and not total > 9", "(\n            value<most\n            and not (total > 9)\n        )"
    )
    assert "(value <= most)\n            and" in apply(fault, "# one more line: ä\n" + moved)
    with pytest.raises(LostAnchorError, match="the nearest statement is `if value < most or"):
        apply(fault, SOURCE.replace("most and not", "most or not"))
    with pytest.raises(ValueError, match="changes nothing"):
        apply(Fault("x", "", "x.py", "add", fault.statement, "value < most", "value < most"), SOURCE)


def test_a_statement_is_replaced_as_a_whole_with_its_indent() -> None:
    statement = "values.discard(value, most, keep=True)"
    twice = apply(Fault("x", "", "x.py", "add", statement, statement, f"{statement}\n{statement}"), SOURCE)
    assert twice.count(f"            {statement}\n") == 2


def test_map_is_the_same_after_writing_and_names_the_function_s_tests_first(tmp_path: Path) -> None:
    entered, beside = frozenset({"mmspeed/a.py::f", "b.py::g"}), frozenset({"mmspeed/a.py::h"})
    known = ReachedMap(
        {"t.py::slow": (3.0, entered), "t.py::quick": (1.0, entered), "t.py::other": (0.1, beside)}, {"t.py": "0"}
    )
    known.write(tmp_path / "map.gz")
    again = ReachedMap.read(tmp_path / "map.gz")
    assert (again.tests, again.files) == (known.tests, known.files)
    fault = Fault("x", "", "mmspeed/a.py", "f", "pass", "pass", "return")
    assert [test for test, _ in again.tests_of(fault)] == ["t.py::quick", "t.py::slow", "t.py::other"]
    more = ReachedMap(known.tests | {"tests/ranks/test_a.py::test_f": (20.0, entered)})
    assert [test for test, _ in more.tests_of(fault)][:2] == ["tests/ranks/test_a.py::test_f", "t.py::quick"]
    top = Fault("x", "", "mmspeed/comm/a.py", "", "pass", "pass", "return")
    known.tests["tests/unit/comm/test_a.py::test_b"] = (0.1, frozenset())
    assert [test for test, _ in known.tests_of(top)] == ["tests/unit/comm/test_a.py::test_b"]


def test_rounds_hold_all_tests_in_order_and_grow() -> None:
    cut = list(rounds([(f"t{n}", 1.0) for n in range(40)], first=5.0))
    assert [test for some in cut for test in some] == [f"t{n}" for n in range(40)] and [len(some) for some in cut] == [
        5,
        10,
        20,
        5,
    ]


@pytest.mark.parametrize(
    ("state", "late", "output", "test"),
    [
        ({"failed": "tests/a.py::test_x", "why": "assert"}, False, "", "tests/a.py::test_x"),
        ({"failed": None, "ended": True, "passed": 3}, False, "", None),
        ({"running": "tests/a.py::test_x"}, True, "", None),
        (
            {"running": "tests/a.py::test_x[1]"},
            False,
            'Timeout (0:00:45)!\n  File "/c/tests/a.py", line 3 in test_x\n',
            "tests/a.py::test_x[1]",
        ),
        ({"running": "tests/a.py::test_x"}, False, 'Timeout (0:00:45)!\n  File "/c/lib/b.py", line 3 in wait\n', None),
    ],
)
def test_a_hang_counts_only_where_the_test_is_named(state: dict, late: bool, output: str, test: str | None) -> None:
    assert _judged(state, late, output, Limits())[0] == test


def test_a_list_is_the_same_after_writing_and_drawn_faults_follow_their_statements(tmp_path: Path) -> None:
    faults = load(LISTS["drawn"])
    write(tmp_path / "list.json", {"about": "x"}, faults)
    assert load(tmp_path / "list.json") == faults
    for fault in faults[:3]:
        renamed = replace(
            fault,
            file="mmspeed/gone.py" if fault.function else fault.file,
            statement=fault.statement.replace("device", "accelerator"),
            before=fault.before.replace("device", "accelerator"),
        )
        assert _nearest(renamed) == fault


TOY = """
def total(values):
    result, place = 0, 0
    while place < len(values):
        result += values[place]
        place += 1
    return result


def unused(value):
    return value + 1
"""
TOY_TESTS = """
import pathlib
from mmspeed.toy import total, unused


def test_total():
    assert total([1, 2]) == 3


def test_no_values():
    assert total([]) == 0


def test_unfit():
    unused(1)
    assert False
"""


@pytest.mark.slow
def test_faults_are_caught_hang_and_escape_in_a_copy(tmp_path: Path) -> None:
    """A small repository: a wrong sum, a loop without end, a fault that a test without use of its result misses."""
    root = tmp_path / "repository"
    files = {
        "mmspeed/__init__.py": "",
        "mmspeed/toy.py": TOY,
        "tests/__init__.py": "",
        "tests/test_toy.py": TOY_TESTS,
        "tests/mutations/__init__.py": "",
        "tests/mutations/batches.py": (ROOT / "tests/mutations/batches.py").read_text(encoding="utf-8"),
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\nfaulthandler_exit_on_timeout = true\n"
        "markers = ['slow: x']\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    tree, limits, sound = Tree(tmp_path, root), Limits(60.0, 5.0), dict[str, bool]()
    name = "tests/test_toy.py::test_"
    total, unused = frozenset({"mmspeed/toy.py::total"}), frozenset({"mmspeed/toy.py::unused"})
    reached = ReachedMap(
        {f"{name}no_values": (0.1, total), f"{name}total": (0.2, total), f"{name}unfit": (0.3, unused)}
    )

    def tried(function: str, before: str, after: str) -> Verdict:
        fault = Fault("x", "", "mmspeed/toy.py", function, before, before, after)
        return try_fault(tree, fault, reached, limits, sound)

    wrong = tried("total", "result += values[place]", "result -= values[place]")
    assert (wrong.test, wrong.passed) == (f"{name}total", 1) and "assert -3 == 3" in wrong.why
    endless = tried("total", "place += 1", "pass")
    assert (endless.test, endless.why) == (f"{name}total", "hangs")
    missed = tried("unused", "return value + 1", "return value + 2")
    assert (missed.test, missed.unfit) == (None, [f"{name}unfit"])
    assert (tree.root / "mmspeed/toy.py").read_text(encoding="utf-8") == TOY


def test_results_go_on_with_the_same_faults_alone(tmp_path: Path) -> None:
    one, other = load(LISTS["by hand"])[:2]
    verdict = Verdict(one.id, one.kind, "a.py:1", "tests/a.py::test_x", "assert", 1.0)
    Results(tmp_path / "r.json").put(one, verdict)
    later = Results(tmp_path / "r.json")
    assert later.of(one) == verdict and later.of(other) is None and later.of(replace(one, after="0")) is None
    assert Results(tmp_path / "r.json", again=True).of(one) is None
