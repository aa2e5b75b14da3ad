"""A case of the campaign, and the place in which it runs.

A case is a function `(scene) -> (figure, passed)` under `@case(...)` in a file of `tests/faults/cases`, where the campaign finds it.
The figure is what the table shows, in words. A case may raise, hang or crash: it has a process of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Outcome = tuple[str, bool]


@dataclass(frozen=True)
class Scene:
    """The place of one case: an empty folder, random numbers of the campaign's seed and the case's name, and the size of the campaign."""

    folder: Path
    draw: random.Random
    full: bool = False

    def count(self, few: int, all_of_them: int) -> int:
        """The number of faults to inject in a draw, and in the full campaign."""
        return all_of_them if self.full else few


@dataclass(frozen=True)
class Case:
    """A function that injects faults, and its limits of seconds in a draw and in the full campaign."""

    name: str
    run: Callable[[Scene], Outcome]
    seconds: float
    full_seconds: float
    only_full: bool = False  # not in a draw

    def limit(self, full: bool) -> float:
        """Seconds after which the case counts as hung."""
        return self.full_seconds if full else self.seconds


def case(
    name: str, seconds: float = 120, full_seconds: float | None = None, only_full: bool = False
) -> Callable[[Callable[[Scene], Outcome]], Case]:
    """The decorator of a case. `seconds`: its limit on a busy machine; `full_seconds`: that of the full campaign, if another."""

    def wrap(function: Callable[[Scene], Outcome]) -> Case:
        return Case(name, function, seconds, full_seconds or seconds, only_full)

    return wrap
