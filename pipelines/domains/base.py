"""Parts that most tasks share: default methods (`TaskDefaults`), data from a sampler and a loader, shares of held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from mmspeed.config import RunConfig
from mmspeed.data import Batching, Loader
from mmspeed.data.sampling.order import StepLocation
from mmspeed.data.sampling.sampler import Sampler
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.loop.checkpoint.state import whole_tensors
from mmspeed.protocols import (
    BatchShape,
    Data,
    DataSize,
    MicroBatches,
    MicroBatchSize,
    Models,
    OrderedSample,
    Preparation,
    RunPlace,
    ShapeClass,
    StepData,
    UseName,
    Validation,
)

Thing = TypeVar("Thing")
S = TypeVar("S", bound=OrderedSample)


class TaskDefaults:
    """Defaults for a task without data to open, text beside items, kernels to try out and held-out items.

    `setting` has no default: with a wrong one, measurements of another model would be used again.
    """

    # read where an installed package declares the task by its class alone (mmspeed/config/tasks.py)
    config_class: ClassVar[type[RunConfig] | None] = None
    preparation_class: ClassVar[type[Preparation] | None] = None

    def open(self, place: RunPlace) -> None:
        """Do nothing."""

    def open_without_data(self) -> None:
        """Do nothing: sizes are the config's."""

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Do nothing."""

    def notes(self) -> tuple[list[str], list[str]]:
        """Empty: no notes."""
        return [], []

    def longest_text(self) -> int | None:
        """None: there is no text beside an item."""
        return None

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """None: nothing is held out."""
        return None

    def info(self) -> dict[str, Any]:
        """Empty: no entries."""
        return {}

    def files(self) -> Mapping[str, Path]:
        """Empty: no files."""
        return {}

    def compare_start(self, start: str) -> list[str]:
        """Empty: no differences that names and sizes of weights do not show."""
        return []

    def export(self, models: Models) -> Iterator[tuple[str, Tensor]]:
        """The parameters and saved buffers of the role "model"."""
        return whole_tensors(models["model"])


class SampledData(Generic[S]):
    """The data of a trainer, from a sampler's order and its loader. `weights`: of its steps; None: all are 1."""

    def __init__(self, sampler: Sampler[S], loader: Loader, weights: StepWeights | None = None) -> None:
        self.sampler, self.loader, self.weights = sampler, loader, weights

    @property
    def waited_seconds(self) -> float:
        return self.loader.waited_seconds

    @property
    def fingerprint(self) -> str:
        return self.sampler.fingerprint

    @property
    def size(self) -> DataSize:
        return DataSize(self.sampler.samples_of(0), self.sampler.steps_per_epoch)

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """The optimizer steps in [start, stop)."""
        return self._measured(start, stop)

    def _measured(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """Yield the loader's steps, each with its divisors, tokens and weight."""
        with closing(self.loader.steps(start, stop)) as steps:
            for number, step in enumerate(steps, start):
                measured = self.measure(step)
                weight = 1.0
                if self.weights is not None:
                    weight = self.weights.weight(number, sum(step.counts.values()), float(measured.tokens or 0))
                yield replace(measured, weight=weight)

    def measure(self, step: StepData) -> StepData:
        """The step with its divisors and tokens, as the loader knows them."""
        return step

    def again(self, step: int, without: Collection[UseName]) -> MicroBatches | None:
        return self.loader.again(step, without)

    def leave_out(self, steps: range) -> list[str]:
        return [use.sample.source for use in self.sampler.leave_out(steps)]

    def shapes(self, step: int) -> list[BatchShape]:
        return self.loader.shapes(step)

    def locate(self, step: int) -> StepLocation:
        return self.sampler.locate(step)

    def state(self, step: int) -> dict[str, Any]:
        return self.sampler.state(step)

    def resume(self, state: Mapping[str, Any]) -> str | None:
        return self.sampler.resume(state)

    def summary(self) -> dict[str, Any] | None:
        """None: no row."""
        return None

    def close(self) -> None:
        """Do nothing: only `steps` starts threads or processes."""


def usual_batch(batching: Batching, shape: ShapeClass, groups: int) -> MicroBatchSize:
    """The usual micro-batch of a shape class where `groups` groups of devices share a step."""
    share = -(-batching.slots // groups)  # samples of a step on each group of devices
    most = batching.at_a_time(shape)
    if shape not in batching.sizes:
        return MicroBatchSize(shape, min(share, most or share), share > (most or share))
    return MicroBatchSize(shape, most or 1, batching.slots > groups)


def largest_batch(
    batching: Batching, shapes: Iterable[ShapeClass], tokens: Callable[[ShapeClass], int], groups: int
) -> MicroBatchSize:
    """The micro-batch with the most tokens; `accumulates` is True where a step of any class has several micro-batches."""
    usual = [usual_batch(batching, shape, groups) for shape in sorted(shapes)]
    largest = max(usual, key=lambda size: tokens(size.shape) * size.items)
    return MicroBatchSize(largest.shape, largest.items, any(size.accumulates for size in usual))


def shares(things: Sequence[Thing], place: RunPlace) -> list[tuple[Thing, bool]]:
    """The things of this rank's group, with fillers so that all groups have the same number; the flag is False for fillers.

    Sharded models need every rank in every forward pass.
    """
    if not things:
        return []
    rounds = -(-len(things) // place.groups)
    return [
        (things[index], True) if index < len(things) else (things[-1], False)
        for index in range(place.group, rounds * place.groups, place.groups)
    ]
