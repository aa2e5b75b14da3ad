"""Training data as the trainer sees it: a sequence of optimizer steps, each of micro-batches.

The same interface serves videos in buckets, packed documents and pairs of preferences. Nothing in it depends on a rank but the
micro-batches themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .batch import Item, MicroBatches, TrackedBatches, UseName
from .shapes import ShapeClass

# Sum of the weights of all items of all ranks, by name; None where it is known only after the forward passes of a step.
Divisors = Mapping[str, "float | None"]


@dataclass(frozen=True)
class BatchShape:
    """The shapes of a micro-batch's tensors, known before it exists."""

    shape: ShapeClass
    items: int
    tensors: Mapping[str, tuple[int, ...]]


def even() -> float:
    """The imbalance of a step that costs every rank the same."""
    return 1.0


@dataclass(frozen=True)
class StepData:
    """The data of an optimizer step.

    Args:
        divisors: the divisors of its terms, the same on every rank.
        batches: this rank's micro-batches; none for a step without items.
        items: the step's items over all ranks, lost ones included; the sequence may make each on access, since few steps are read.
        counts: items of each shape class over all ranks, without lost and left out ones.
        tokens: real tokens of these, where the data knows them; None: the task counts by shape.
        weight: what its mean counts among the steps of its epoch, the same on every rank; above 0, and 1 where all steps count alike.
        left_out: of the items, those that a roll-back has left out.
        imbalance: computes the greatest over the mean cost across ranks, 1 at best; called for the steps that are logged.
    """

    divisors: Divisors
    batches: TrackedBatches
    items: Sequence[Item]
    counts: Mapping[ShapeClass, int]
    tokens: int | None = None
    weight: float = 1.0
    imbalance: Callable[[], float] = even
    left_out: int = 0


class OrderedSample(Protocol):
    """A sample as the order of training sees it."""

    @property
    def key(self) -> str:
        """The name of the content: unique, and different when the content changes."""
        ...

    @property
    def bucket(self) -> ShapeClass:
        """The shape class of the sample."""
        ...

    @property
    def dataset(self) -> str:
        """The name of the sample's data set; empty where there is only one."""
        ...

    @property
    def source(self) -> str:
        """The origin of the sample, for messages."""
        ...

    @property
    def lost(self) -> bool:
        """True for a sample that cannot be read but keeps its place in the order."""
        ...


class Location(Protocol):
    """The position of a step in the order of training."""

    @property
    def epoch(self) -> int:
        """Epochs before this one, through all stages."""
        ...


@dataclass(frozen=True)
class DataSize:
    """The samples of the first stage of training, and the steps of a whole epoch of them; those left out as they teach nothing."""

    samples: int
    steps_per_epoch: int
    left_out: int = 0


class Data(Protocol):
    """The order of training, and this rank's share of each step."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that the trainer has waited for data so far."""
        ...

    @property
    def fingerprint(self) -> str:
        """A name for the content of all training data."""
        ...

    @property
    def size(self) -> DataSize:
        """The number of samples, and of steps of an epoch."""
        ...

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """The optimizer steps in [start, stop), counted from the start of training. Closing it ends threads and processes."""
        ...

    def again(self, step: int, without: Collection[UseName]) -> MicroBatches | None:
        """This rank's micro-batches of a step without these uses, the same draws otherwise; None where no use is left."""
        ...

    def leave_out(self, steps: range) -> list[str]:
        """Leave the uses in these steps out from now on, whatever is resumed; returns their sources. `steps` count from 0."""
        ...

    def shapes(self, step: int) -> list[BatchShape]:
        """The shapes of this rank's micro-batches of a step, before any of them is read.

        Asked by tests so far; kept for a pipeline's runner, whose stages make room for what they receive, and for the planner.
        """
        ...

    def locate(self, step: int) -> Location:
        """The position of an optimizer step."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """The state that a checkpoint taken before `step` holds, in JSON's types; it is the same on any number of ranks."""
        ...

    def resume(self, state: Mapping[str, Any]) -> str | None:
        """Resume from a checkpoint's state, before the first step is taken. Returns a message for the user, if there is one."""
        ...

    def summary(self) -> dict[str, Any] | None:
        """The last row of metrics.jsonl about the data, with its `kind`; None when there is none."""
        ...

    def close(self) -> None:
        """End the work that the data started, such as the encoding of an epoch; results so far are stored."""
        ...
