"""Decoders on 1, 2 and 4 processes through the loss of their task: a pairwise cover of layouts, kinds of models, memory ways and packs.

Tolerance: 1e-5 of a gradient's largest entry, since sums over processes and heads are taken in another order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.covers import Combination, pairwise
from tests.support.language_steps import LAYOUTS, SETTINGS, possible, steps
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
FEW = ["tp", "ulysses", "ring", "ep", "ep over tp"]  # layouts of which a combination runs by default


@cache
def cover() -> list[Combination]:
    """Combinations in which all pairs of settings meet."""
    return pairwise(SETTINGS, possible)


def hold(case: Combination, ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    assert first["names"] and first["loss"] <= TOLERANCE and first["terms"] <= TOLERANCE, (case, first)
    assert first["gap"] <= TOLERANCE, (case, first)
    for result in ranks:
        assert result["sent"] == result["due"] and not result["uncrossed"], (case, result)


def hold_all(world: int, wanted: list[Combination]) -> None:
    results = run_ranks(steps, world, world, wanted)
    for case, *ranks in zip(wanted, *results, strict=True):
        hold(case, ranks)


def test_the_cover_has_many_combinations_of_all_layouts() -> None:
    assert len(cover()) >= 60
    assert {case["layout"] for case in cover()} == {name for layouts in LAYOUTS.values() for name in layouts}


def test_a_few_compute_what_one_process_does() -> None:
    hold_all(2, [next(case for case in cover() if case["layout"] == name) for name in FEW])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_compute_what_one_process_does(world: int) -> None:
    hold_all(world, [case for case in cover() if case["layout"] in LAYOUTS[world]])
