"""What a plan of sequence parallelism can say about a model: a declaration, with nothing to run (`parallel.declared` does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Split:
    """Keep this rank's part of a tensor (or of each tensor in a list) along `dim`.

    sequence: name of the sequence, or of several that lie behind one another along `dim` (a mask over [video, text]).
    The first split of a forward tells a sequence's length; all others must agree. A tensor with another number of
    dimensions than `ndim` is left whole, and so is one of size 1 along `dim` when `broadcast`. `least`: tokens that every
    rank must get.
    """

    sequence: str | tuple[str, ...]
    dim: int
    ndim: int | None = None
    broadcast: bool = False
    least: int = 0


@dataclass(frozen=True)
class Leading:
    """An integer argument, a number of tokens at the start of `sequence`: how many of them are on this rank."""

    sequence: str


@dataclass(frozen=True)
class Gather:
    """Put the parts of all ranks together again along `dim`."""

    sequence: str
    dim: int


@dataclass(frozen=True)
class Attends:
    """The sequences behind one another in a module's queries and in its keys (None: those of the queries)."""

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SequencePlan:
    """What is split, where it is gathered, and which modules attend across ranks.

    Modules are named as in `named_modules`; `*` stands for one whole or partial name between dots; "" is the model.

    inputs: module -> argument of its forward -> Split or Leading.
    outputs: module -> place in its output (0 for a single tensor; a key of a dict) -> Split or Gather.
    attention: module -> the sequences that its scaled-dot-product attention runs over (a tuple, or Attends).
    frames: (argument of the model's forward, dim): where the number of frames stands; dim None: the argument is that number.
    When it is 1 the input is an image: nothing is split or exchanged, and every rank computes its own.
    causal: attention is causal; parts are then cut in zigzag order, in which all ranks of a ring have equal work.
    """

    inputs: Mapping[str, Mapping[str, Split | Leading]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int | str, Split | Gather]] = field(default_factory=dict)
    attention: Mapping[str, tuple[str, ...] | Attends] = field(default_factory=dict)
    frames: tuple[str, int | None] | None = None
    causal: bool = False


@runtime_checkable
class DeclaresSequencePlan(Protocol):
    """A model that says itself how its sequences are split."""

    sequence_plan: SequencePlan


def plan_of(model: object) -> SequencePlan | None:
    """The plan that a model declares; None of one that declares none."""
    return model.sequence_plan if isinstance(model, DeclaresSequencePlan) else None
