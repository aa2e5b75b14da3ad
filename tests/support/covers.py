"""Covers of many cases: pairwise combinations of settings, found greedily from a seed, and cases that run by default."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest

Combination = dict[str, str]
Pair = tuple[str, str, str, str]  # setting, value, setting, value


def pairwise(
    settings: Mapping[str, Sequence[str]], allowed: Callable[[Combination], bool], seed: int = 0
) -> list[Combination]:
    """Allowed combinations in which all pairs meet that can meet; each of them takes most of those that are left.

    Early combinations are those with most that is new. The same seed gives the same list.
    """
    names = list(settings)
    every = [dict(zip(names, values, strict=True)) for values in product(*settings.values())]
    every = [each for each in every if allowed(each)]
    random.Random(seed).shuffle(every)
    return [every[place] for place in greedy([pairs(each) for each in every])]


def greedy(met: Sequence[set[Any]], known: Iterable[Any] = ()) -> list[int]:
    """Places of sets whose union with `known` is that of all: each has most of what is left, the first of equals."""
    left, results = set[Any]().union(*met) - set(known), []
    while left:
        best = max(range(len(met)), key=lambda place: len(met[place] & left))
        results.append(best)
        left -= met[best]
    return results


def pairs(combination: Combination) -> set[Pair]:
    """The pairs of values that meet in a combination."""
    return {(a, combination[a], b, combination[b]) for a, b in combinations(combination, 2)}


def slow_but(names: Iterable[Any], default: Container[Any]) -> list[Any]:
    """Parameters of a test: the names, of which those outside of `default` are marked slow."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in names]


def checkered(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test: all combinations of the axes' values, of which every second one is slow, like fields of a chessboard.

    Each two values of two axes meet by default where there is a third axis, and each value has half of its partners where there is none.
    A `pytest.param` on an axis stands for its values and marks.
    """
    combined = []
    for chosen in product(*(enumerate(map(as_param, axis)) for axis in axes)):
        values = chain.from_iterable(param.values for _, param in chosen)
        marks = [*chain.from_iterable(param.marks for _, param in chosen)]
        if sum(place for place, _ in chosen) % 2:
            marks.append(pytest.mark.slow)
        combined.append(pytest.param(*values, marks=marks))
    return combined


def as_param(value: Any) -> Any:
    """The value as a `pytest.param`, if it is none."""
    return value if isinstance(value, type(pytest.param())) else pytest.param(value)


def every_second(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the names, of which every second one is slow."""
    names = list(names)
    return slow_but(names, names[::2])
