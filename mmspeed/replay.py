"""What a forward pass decides or keeps, so that a second pass, which recomputes it in backward, does the same.

A decision that hangs on rounding (which keys are kept, which expert a token goes to) may fall otherwise when it is made again: then the
gradient is that of another function. So it is recorded in the first pass and replayed in all later ones. And some results are dear
to make again, such as an exchange between devices: code that makes them offers them (`kept`), and whoever recomputes says whether they
are held (`Record.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
Kind = Literal["matmul", "attention", "exchange"]  # of what is dear to make again

# Of the pass that this thread is in: a span's work reaches code that knows nothing of spans, as autocast does.
_CURRENT: ContextVar[Record | None] = ContextVar("mmspeed_record", default=None)


class Record:
    """The decisions of one forward pass, in their order. By itself it keeps no results."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._place = 0

    def settle(self, make: Callable[[], T]) -> tuple[T, bool]:
        """The decision at this place, and whether it was made just now."""
        first = self._place == len(self._made)
        if first:
            self._made.append(make())
        self._place += 1
        return self._made[self._place - 1], first

    def kept(self, kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Results that are dear to make again."""
        return make()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A pass begins: inside, `settle` and `kept` come here."""
        self._place = 0
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


def recording() -> bool:
    """Whether this thread is in a pass that will be, or is, made again."""
    return _CURRENT.get() is not None


def settle(make: Callable[[], T]) -> tuple[T, bool]:
    """`make()`, or what it gave in the first pass; and whether it was made just now."""
    record = _CURRENT.get()
    return (make(), True) if record is None else record.settle(make)


def kept(kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`make()`, or, in a second pass that held them, the tensors of the first.

    Call it where no gradient is recorded, such as in the forward of an autograd function, with new tensors as results. They must not
    be changed afterwards.
    """
    record = _CURRENT.get()
    return make() if record is None else record.kept(kind, make)


def offered(offers: bool, kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`kept` where `offers`, else `make()`.

    offers: whether the caller of the autograd function records gradients. What is made without may be made in the first pass alone, such
    as a plan; then it has no place among the results of both passes. Exchanges of gradients are never offered.
    """
    return kept(kind, make) if offers else make()


class Decides(nn.Module):
    """A module that decides something in its forward, by `settle`."""

    settle = staticmethod(settle)


def deciders(module: nn.Module) -> list[Decides]:
    """Those of `module` and its parts that decide."""
    return [part for part in module.modules() if isinstance(part, Decides)]


def replayed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose second call decides as its first did. For one forward pass."""
    record = Record()

    def once(*args: Any, **kwargs: Any) -> Any:
        with record.in_force():
            return run(*args, **kwargs)

    return once
