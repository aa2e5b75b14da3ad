"""Records of a forward pass: decisions and results that a recomputation in backward must repeat.

A decision that depends on rounding (which keys are kept, which expert a token goes to) may differ when it is made again: the gradient
is then that of another function. So it is recorded in the first pass and replayed in all later ones. Some results are expensive to
recompute, such as an exchange between devices: the code that makes them offers them (`checkpointed`), and the record of the
recomputation decides whether they are held (`DecisionRecord.holds`).

A record belongs to one forward pass and lives as long as its graph: passes of several micro-batches may overlap, and the second one may
run in another thread. Records nest: in its first pass an inner record asks the record around it, which may be in its second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from mmspeed.torch_internals import counting_changes, keeps_graph, version_of

T = TypeVar("T")
Kind = Literal["matmul", "attention", "exchange"]  # of results that are expensive to recompute
TensorFactory = Callable[[], tuple[Tensor, ...]]

# The record of the pass that this thread is in. Like autocast, it reaches code that knows nothing of spans.
_CURRENT: ContextVar[DecisionRecord | None] = ContextVar("mmspeed_record", default=None)


@dataclass(eq=False)
class FirstHalf:
    """The first half of a result that is made in two, as one record knows it.

    outer: the same half, as the record around knows it. whole: the second half was made in the same first pass, of the same record.
    """

    outer: FirstHalf | None = None
    whole: bool = False

    @property
    def recomputed(self) -> bool:
        """True where a first pass has made it already."""
        return self.whole or (self.outer is not None and self.outer.recomputed)


class DecisionRecord:
    """The decisions of one forward pass, in their order. This class keeps no results."""

    def __init__(self) -> None:
        self._decisions: list[Any] = []
        self._place = 0
        self._begun: list[FirstHalf] = []
        self._next = 0
        self._facts: dict[object, Any] = {}
        self._passes = 0  # that have ended
        self._outer: DecisionRecord | None = None  # in whose pass the first pass of this one runs

    within_region = False  # regions inside run unchanged: the one around them determines what backward reads

    @property
    def later(self) -> bool:
        """True where a pass has ended, so that the present one is a recomputation."""
        return self._passes > 0

    def record_or_replay(self, make: Callable[[], T]) -> tuple[T, bool]:
        """The decision at this position, and True where it was made just now. A decision within another one is not recorded by itself."""
        fresh = False
        if self._place == len(self._decisions):
            if self._outer is not None:
                decision, fresh = self._outer.record_or_replay(make)
            else:
                with apart():
                    decision, fresh = make(), True
            self._decisions.append(decision)
        self._place += 1
        return self._decisions[self._place - 1], fresh

    def fact(self, key: object, make: Callable[[], T]) -> T:
        """The value of `make()` at the first request, in any pass."""
        if key not in self._facts:
            self._facts[key] = make() if self._outer is None else self._outer.fact(key, make)
        known: T = self._facts[key]
        return known

    def set_fact(self, key: object, value: object) -> None:
        """Let `fact` return `value` from here on; each pass calls this again."""
        self._facts[key] = value

    def checkpointed(self, kind: Kind, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
        """Results that are expensive to recompute. `what`: the work, to be compared with that of the first pass."""
        return make() if self._outer is None else self._outer.checkpointed(kind, make, what)

    def holds(self, kind: Kind) -> bool:
        """True where later passes take the results of this kind from the first one."""
        return False

    def begin(self, kind: Kind) -> tuple[FirstHalf, bool]:
        """The first half at this position, and True where this pass makes it: a later one does if it makes the second half again."""
        if self._next == len(self._begun):
            outer, issues = (None, True) if self._outer is None else self._outer.begin(kind)
            self._begun.append(FirstHalf(outer))
        else:
            issues = self._begun[self._next].whole and not self.holds(kind)
        self._next += 1
        return self._begun[self._next - 1], issues

    def complete(self, kind: Kind, half: FirstHalf, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
        """The second half of a result. Raises RuntimeError as the function of this name does."""
        record: DecisionRecord | None = self
        while record is not None:
            own = record._own(half)
            if own is not None:
                own.whole = True
            elif not record.holds(kind):
                raise RuntimeError(
                    f"an {kind} that was started before a recomputed region is finished inside it, and the region computes each {kind} "
                    "again: start it inside, or keep its results"
                )
            record = record._outer
        return self.checkpointed(kind, make, what)

    def _own(self, half: FirstHalf | None) -> FirstHalf | None:
        """A half as this record knows it; None where it was begun elsewhere."""
        while half is not None and not any(half is one for one in self._begun):
            half = half.outer
        return half

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Begin a pass: inside, `record_or_replay`, `checkpointed` and `begin` use this record."""
        self._place = self._next = 0
        self._outer = None if self.later else _CURRENT.get()
        self.within_region |= self._outer is not None and self._outer.within_region
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self._outer = None
            self._passes += 1


@dataclass(frozen=True)
class _Kept:
    """The results of one piece of work, and the count of in-place changes of each tensor at that time."""

    what: tuple[Kind, object]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def give(self) -> tuple[Tensor, ...]:
        if self.versions != tuple(map(version_of, self.tensors)):
            raise RuntimeError(
                "the result of an exchange is kept for recomputation and was changed in place after it was made"
            )
        return tuple(tensor.detach() for tensor in self.tensors)


class ExchangeRecord(DecisionRecord):
    """Decisions, and the results of exchanges until a later pass takes them; `again`: none are kept, and later passes exchange again."""

    def __init__(self, again: bool = False, within_region: bool = False) -> None:
        super().__init__()
        self._again, self._results, self._taken = again, list[_Kept | None](), 0
        self.within_region = within_region

    def holds(self, kind: Kind) -> bool:
        return kind == "exchange" and not self._again

    def tensors(self) -> list[Tensor]:
        """The tensors that are kept now."""
        return [tensor for result in self._results if result is not None for tensor in result.tensors]

    def checkpointed(self, kind: Kind, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
        if not self.holds(kind):
            return super().checkpointed(kind, make, what)
        if self.later:
            return self._take((kind, what))
        with apart():  # their inputs are not kept by themselves
            results = super().checkpointed(kind, make, what)
        with counting_changes():
            detached = tuple(tensor.detach() for tensor in results)  # autograd gets other objects
        self._results.append(_Kept((kind, what), detached, tuple(map(version_of, detached))))
        return results

    def _take(self, what: tuple[Kind, object]) -> tuple[Tensor, ...]:
        place, self._taken = self._taken, self._taken + 1
        result = self._results[place] if place < len(self._results) else None
        if result is None:
            raise RuntimeError(
                f"recomputation makes an {what[0]} of which it has no result: it computes something else than the first pass, or it is "
                "the second of a graph that was not retained"
            )
        if result.what != what:
            raise RuntimeError(
                f"recomputation makes another {what[0]} than the first pass made at this place: both must make the same, in one order"
            )
        if not keeps_graph():
            self._results[place] = None
        return result.give()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        self._taken = 0
        with super().in_force():
            try:
                yield
            finally:
                if self.later and not keeps_graph():  # the recomputation stopped when backward had all that it needs
                    self._results = [None] * len(self._results)


def recording() -> bool:
    """True where this thread is in a pass that will be, or is being, recomputed."""
    return _CURRENT.get() is not None


def in_region() -> bool:
    """True where this thread is in a pass of a recomputed region."""
    record = _CURRENT.get()
    return record is not None and record.within_region


@contextmanager
def apart() -> Iterator[None]:
    """Record nothing inside: for work of the first pass alone, such as a measurement, which the second does not repeat."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def record_or_replay(make: Callable[[], T]) -> tuple[T, bool]:
    """The value of `make()`, or that of the first pass; and True where it was made just now."""
    record = _CURRENT.get()
    return (make(), True) if record is None else record.record_or_replay(make)


def fact(key: object, make: Callable[[], T]) -> T:
    """The value of `make()` at the first request in the forward pass that is recomputed, independent of the order of requests."""
    record = _CURRENT.get()
    return make() if record is None else record.fact(key, make)


def set_fact(key: object, value: object) -> None:
    """Let `fact` return `value` from here on in the pass that this thread is in."""
    record = _CURRENT.get()
    if record is not None:
        record.set_fact(key, value)


def checkpointed(kind: Kind, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
    """The tensors of `make()`, or, in a second pass that holds them, those of the first.

    Call it where no gradient is recorded, such as in the forward of an autograd function, with new tensors as results, in both passes
    (`apart` for results of the first alone). They must not be changed afterwards.
    """
    record = _CURRENT.get()
    return make() if record is None else record.checkpointed(kind, make, what)


def checkpointed_if(offers: bool, kind: Kind, make: TensorFactory) -> tuple[Tensor, ...]:
    """The tensors of `checkpointed` where `offers`, else those of `make()`.

    offers: True where the caller of the autograd function records gradients. A result without gradients may be made in the first pass
    alone, such as a plan; then it is none of the results of both passes.
    """
    return checkpointed(kind, make) if offers else make()


def begin(kind: Kind) -> tuple[FirstHalf, bool]:
    """The first half of a result that is made in two, and True where it is to be made. Called like `checkpointed`; `complete` is for the
    second half.

    It is not made again where the results are held, nor where the second half is outside of the recomputation.
    """
    record = _CURRENT.get()
    return (FirstHalf(), True) if record is None else record.begin(kind)


def complete(kind: Kind, half: FirstHalf | None, make: TensorFactory, what: object = None) -> tuple[Tensor, ...]:
    """The tensors of `checkpointed` for the second half of a result; `make()` alone for a first half that was not offered (None).

    Raises RuntimeError where a pass that holds no such results would make the second half again without the first.
    """
    record = _CURRENT.get()
    return make() if half is None or record is None else record.complete(kind, half, make, what)


class RecordedModule(nn.Module):
    """A module that decides something in its forward, by `record_or_replay`."""

    record_or_replay = staticmethod(record_or_replay)


def recorded_modules(module: nn.Module) -> list[RecordedModule]:
    """The recorded modules among `module` and its submodules."""
    return [part for part in module.modules() if isinstance(part, RecordedModule)]


def replayed(run: Callable[..., Any], exchange_again: bool = False) -> Callable[..., Any]:
    """A `run` whose second call repeats the decisions of its first, and exchanges nothing unless `exchange_again`. For one forward pass."""
    record = ExchangeRecord(exchange_again)

    def once(*args: Any, **kwargs: Any) -> Any:
        with record.in_force():
            return run(*args, **kwargs)

    return once
