"""Decoders on 1, 2, 4 and 8 processes through the loss of their task: covers of layouts, kinds of models, memory ways and packs.

Tolerance: 1e-5 of a gradient's largest entry, since sums over processes and heads are taken in another order. Loads of experts are equal.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.covers import Combination
from tests.support.language_combinations import DEGREES, EDGES, KINDS, PLAIN, SETTINGS, WORLDS, cover, few
from tests.support.language_steps import steps
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5


def hold(case: Combination, ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    assert first["names"] and first["loss"] <= TOLERANCE and first["terms"], (case, first)
    assert first["counts"] and not first["idle gradients"], (case, first)
    for result in ranks:
        assert result["reads"] == ["tolist"] * result["layers"], (case, result)  # one by the host, of each layer's rows
        assert not result["uncrossed"], (case, result)
        if case["memory"] != "exchanged again":
            assert result["sent"] == result["due"] and result["sent far"] == result["due far"], (case, result)
    assert first["gap"] <= TOLERANCE, (case, first)
    assert first["routers"] <= TOLERANCE, (case, first)


def hold_all(world: int, wanted: list[Combination], poison: bool) -> list[list[dict[str, Any]]]:
    """The results of all ranks, case by case."""
    results = [list(ranks) for ranks in zip(*run_ranks(steps, world, world, wanted, poison, timeout=1500), strict=True)]
    for case, ranks in zip(wanted, results, strict=True):
        hold(case, ranks)
    return results


@pytest.mark.slow
def test_the_covers_have_many_combinations_of_all_values() -> None:
    cases = [case for world in WORLDS for case in cover(world)]
    assert sum(int(case["ep"]) * int(case["etp"]) > 1 for case in cases) >= 80
    for name, values in (DEGREES | SETTINGS).items():
        assert {case[name] for case in cases} == {*values}, name


def test_a_few_compute_what_one_process_does() -> None:
    hold_all(2, few(2), poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_all_compute_what_one_process_does(world: int, half: int, poison: bool) -> None:
    hold_all(world, cover(world)[half::2], poison)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
def test_processes_without_tokens_and_experts_without_rows(poison: bool) -> None:
    rows = [(kind, edge) for kind in KINDS for edge in EDGES]
    results = hold_all(4, [PLAIN | KINDS[kind] | EDGES[edge][0] for kind, edge in rows], poison)
    for row, ranks in zip(rows, results, strict=True):
        _, tokens, idle = EDGES[row[1]]
        assert min(rank["tokens"] for rank in ranks) == tokens and (ranks[0]["idle"] > 0) == idle, (row, ranks[0])
