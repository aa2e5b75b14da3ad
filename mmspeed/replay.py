"""What a forward pass decides, so that a second pass, which recomputes it in backward, decides the same.

A decision that hangs on rounding (which keys are kept, which expert a token goes to) may fall otherwise when it is made again: then the
gradient is that of another function. So it is recorded in the first pass and replayed in all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class Record:
    """The decisions of one forward pass, in their order."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._place = 0

    def rewind(self) -> None:
        """A pass begins."""
        self._place = 0

    def settle(self, make: Callable[[], T]) -> tuple[T, bool]:
        """The decision at this place, and whether it was made just now."""
        first = self._place == len(self._made)
        if first:
            self._made.append(make())
        self._place += 1
        return self._made[self._place - 1], first


class Decides(nn.Module):
    """A module that decides something in its forward."""

    record: Record | None = None

    def settle(self, make: Callable[[], T]) -> tuple[T, bool]:
        """`make()`, or what it gave in the first pass; and whether it was made just now."""
        return (make(), True) if self.record is None else self.record.settle(make)


def deciders(module: nn.Module) -> list[Decides]:
    """Those of `module` and its parts that decide."""
    return [part for part in module.modules() if isinstance(part, Decides)]


def replayed(run: Callable[..., Any], parts: Iterable[Decides]) -> Callable[..., Any]:
    """`run`, whose second call decides as its first did. For one forward pass."""
    record, parts = Record(), list(parts)

    def once(*args: Any, **kwargs: Any) -> Any:
        record.rewind()
        for part in parts:
            part.record = record
        try:
            return run(*args, **kwargs)
        finally:
            for part in parts:
                part.record = None

    return once
