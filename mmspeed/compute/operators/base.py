"""Operators with several implementations: a rule says which one serves a call, and calls are counted.

An implementation refuses a call with a reason in words, or serves it ("" as its reason). They are tried in the order of the operator; the
last one is the eager twin, which refuses nothing: the formula written out, and the oracle of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

# The counts that this thread's calls go to. Like autocast, it reaches models that know nothing of counts.
_COUNTS: ContextVar[Counter[str] | None] = ContextVar("mmspeed_operator_counts", default=None)


def serves_all(*_: Any) -> str:
    """The reason of an implementation that serves every call: none."""
    return ""


@dataclass(frozen=True)
class Implementation:
    """A way to compute an operator. `refuses`: the reason, by the call's arguments, why it does not serve; "" where it does."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str] = serves_all


@dataclass(frozen=True)
class Operator:
    """An operator by its implementations, preferred ones first, the eager twin last. Arguments are positional."""

    name: str
    implementations: tuple[Implementation, ...]

    def __call__(self, *args: Any) -> Any:
        """The result of the first implementation that serves."""
        chosen = self.choose(*args)
        if not torch.compiler.is_compiling():
            counts = _COUNTS.get()
            if counts is not None:
                counts[f"{self.name}.{chosen.name}"] += 1
        return chosen.run(*args)

    def choose(self, *args: Any) -> Implementation:
        """The implementation that serves these arguments."""
        return next(one for one in self.implementations if not one.refuses(*args))

    def reasons(self, *args: Any) -> dict[str, str]:
        """Why implementations refuse these arguments, by name, without those that would serve."""
        answers = {one.name: one.refuses(*args) for one in self.implementations}
        return {name: reason for name, reason in answers.items() if reason}

    @property
    def eager(self) -> Implementation:
        """The twin that serves every call."""
        return self.implementations[-1]

    def __getitem__(self, name: str) -> Implementation:
        for one in self.implementations:
            if one.name == name:
                return one
        raise KeyError(
            f"{self.name} has no implementation {name!r}: {', '.join(one.name for one in self.implementations)}"
        )


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of operators inside, by `operator.implementation`; code that torch.compile makes graphs of is not counted."""
    counts: Counter[str] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
