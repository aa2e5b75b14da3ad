"""The options that a choice is made of, and the file that records it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.options import StaticMemory, StepFigures, front, least_bytes
from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME, fastest_within, read_choice


def test_the_least_of_bytes_is_always_an_option() -> None:
    """However slow it was measured to be: else a budget that fits would be refused by the clock's noise."""
    slow = Option(5, 3, 4, seconds=9.0)
    options = [Option(10, 1, 8), Option(4, 9, 9, seconds=0.1), slow, Option(6, 2, 5, seconds=0.2)]
    assert slow not in front([*options, Option(5, 9, 9, seconds=0.05)])
    assert least_bytes(options) == [options[1], slow]


def test_a_choice_that_takes_a_little_more_than_expected_is_left_for_the_next() -> None:
    """Also where the next target would give the same choice again; and what takes least is tried before giving up."""
    kinds = (0, 0, 0)
    options = (Option(100), Option(60, 30, 30, seconds=1.0), Option(10, 60, 60, seconds=3.0))
    figures = StepFigures(StaticMemory(0, 0, 0, 0, 0, 0), 0, 0, kinds, (options,), (0, 0, 0), keep_last=False)
    measured: list[list[int]] = []

    class Device:
        def peak(self, ways: Any) -> int:
            chosen = [
                next(i for i, o in enumerate(b) if o.ways == w) for b, w in zip(named.blocks(), ways, strict=True)
            ]
            measured.append(chosen)
            return named.peak(chosen) + (1 if len(measured) < 4 else 0)

        def seconds(self) -> float:
            return 1.0

    entries = [
        replace(option, ways={"block": way})
        for option, way in zip(options, ("save", "recompute", "offload"), strict=True)
    ]
    named = replace(figures, options=(tuple(entries),))
    for budget in {named.peak([a, b, c]) for a in range(3) for b in range(3) for c in range(3)}:
        measured.clear()
        if budget <= named.least():
            continue
        choice = fastest_within(named, budget, cast(Any, Device()))
        assert choice.measured_peak <= budget
        assert (
            len(measured) == len({tuple(one) for one in measured[:-1]}) + 1
        )  # none is tried twice; the one taken is set again


def test_a_damaged_choice_is_reported_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {
        "setting": {"a": 1},
        "blocks": [{"block": "recompute"}, {}],
        "budget_bytes": 9,
        "expected": {"peak_bytes": 8, "added_seconds": 0.0, "added_share": 0.0},
        "measured": {"peak_bytes": 7, "step_seconds": 1.0},
    }
    path = tmp_path / MEMORY_NAME
    assert read_choice(path, {"a": 1}, 2) is None
    path.write_text(json.dumps(good))
    choice = read_choice(path, {"a": 1}, 2)
    assert choice is not None and choice.ways == ({"block": "recompute"}, {}) and choice.measured_peak == 7
    assert read_choice(path, {"a": 2}, 2) is None and not caplog.records
    wrong: list[Any] = [
        good | {"blocks": [{"block": "nonsense"}, {}]},
        good | {"blocks": [{}]},
        [],
        None,
        {"setting": {"a": 1}},
    ]
    for damaged in [json.dumps(each) for each in wrong] + ["{"]:
        caplog.clear()
        path.write_text(damaged)
        assert read_choice(path, {"a": 1}, 2) is None
        assert "is damaged" in caplog.text and "chosen again" in caplog.text
    caplog.clear()
    path.write_text(json.dumps({"report": {}}))
    assert read_choice(path, {"a": 1}, 2) is None and not caplog.records
