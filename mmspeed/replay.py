"""What a forward pass decides or keeps, so that a second pass, which recomputes it in backward, does the same.

A decision that hangs on rounding (which keys are kept, which expert a token goes to) may fall otherwise when it is made again: then the
gradient is that of another function. So it is recorded in the first pass and replayed in all later ones. And some results are dear
to make again, such as an exchange between devices: code that makes them offers them (`checkpointed`), and whoever recomputes says whether
they are held (`DecisionRecord.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
Kind = Literal["matmul", "attention", "exchange"]  # of what is dear to make again

# Of the pass that this thread is in: a span's work reaches code that knows nothing of spans, as autocast does.
_CURRENT: ContextVar[DecisionRecord | None] = ContextVar("mmspeed_record", default=None)


@dataclass(eq=False)
class FirstHalf:
    """The first half of a result that is made in two. `whole`: the second half was made in the same first pass, of the same record."""

    whole: bool = False


class DecisionRecord:
    """The decisions of one forward pass, in their order. By itself it keeps no results."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._place = 0
        self._deciding = False
        self._begun: list[FirstHalf] = []
        self._next = 0

    def record_or_replay(self, make: Callable[[], T]) -> tuple[T, bool]:
        """The decision at this place, and whether it was made just now. One that is a part of another is not recorded by itself."""
        if self._deciding:
            return make(), True
        first = self._place == len(self._made)
        if first:
            self._deciding = True
            try:
                self._made.append(make())
            finally:
                self._deciding = False
        self._place += 1
        return self._made[self._place - 1], first

    def checkpointed(self, kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Results that are dear to make again."""
        return make()

    def holds(self, kind: Kind) -> bool:
        """Whether later passes are given the results of this kind that the first one made."""
        return False

    def begin(self, kind: Kind) -> tuple[FirstHalf, bool]:
        """The first half at this place, and whether this pass is to make it: a later one does where it makes the second half again."""
        first = self._next == len(self._begun)
        if first:
            self._begun.append(FirstHalf())
        half = self._begun[self._next]
        self._next += 1
        return half, first or (half.whole and not self.holds(kind))

    def began(self, half: FirstHalf) -> bool:
        """Whether this record has the first half."""
        return any(half is one for one in self._begun)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A pass begins: inside, `record_or_replay`, `checkpointed` and `begin` come here."""
        self._place = self._next = 0
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


def recording() -> bool:
    """Whether this thread is in a pass that will be, or is, made again."""
    return _CURRENT.get() is not None


def record_or_replay(make: Callable[[], T]) -> tuple[T, bool]:
    """`make()`, or what it gave in the first pass; and whether it was made just now."""
    record = _CURRENT.get()
    return (make(), True) if record is None else record.record_or_replay(make)


def checkpointed(kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`make()`, or, in a second pass that held them, the tensors of the first.

    Call it where no gradient is recorded, such as in the forward of an autograd function, with new tensors as results. They must not
    be changed afterwards.
    """
    record = _CURRENT.get()
    return make() if record is None else record.checkpointed(kind, make)


def checkpointed_if(offers: bool, kind: Kind, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`checkpointed` where `offers`, else `make()`.

    offers: whether the caller of the autograd function records gradients. What is made without may be made in the first pass alone, such
    as a plan; then it has no place among the results of both passes. Exchanges of gradients are never offered.
    """
    return checkpointed(kind, make) if offers else make()


def begin(kind: Kind) -> tuple[FirstHalf, bool]:
    """The first half of a result that is made in two, and whether it is to be made. Called as `checkpointed` is, with `complete` for the
    second.

    It is not made again where the results are held, nor where the second half lies outside of what is made again.
    """
    record = _CURRENT.get()
    return (FirstHalf(), True) if record is None else record.begin(kind)


def complete(kind: Kind, half: FirstHalf | None, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`checkpointed`, of the second half of a result; `make()` alone for a first half that was not offered (None).

    Raises RuntimeError where a pass that holds no such results would make the second half again without the first.
    """
    record = _CURRENT.get()
    if half is None or record is None:
        return make()
    if record.began(half):
        half.whole = True
    elif not record.holds(kind):
        raise RuntimeError(
            f"an {kind} that was started before a recomputed region is finished inside it, and the region computes each {kind} again: "
            "start it inside, or keep its results"
        )
    return record.checkpointed(kind, make)


class RecordedModule(nn.Module):
    """A module that decides something in its forward, by `record_or_replay`."""

    record_or_replay = staticmethod(record_or_replay)


def recorded_modules(module: nn.Module) -> list[RecordedModule]:
    """Those of `module` and its parts that decide."""
    return [part for part in module.modules() if isinstance(part, RecordedModule)]


def replayed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose second call decides as its first did. For one forward pass."""
    record = DecisionRecord()

    def once(*args: Any, **kwargs: Any) -> Any:
        with record.in_force():
            return run(*args, **kwargs)

    return once
