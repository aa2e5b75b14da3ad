"""Parts that most domains share: default methods (`DomainDefaults`), data from a sampler and a loader, shares of held-out samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from mmspeed.config import RunConfig
from mmspeed.data import Batching, Loader
from mmspeed.data.sampling.order import StepLocation
from mmspeed.data.sampling.sampler import Sampler
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.device import Device
from mmspeed.protocols import (
    Batch,
    BatchShape,
    Data,
    DataSize,
    Domain,
    LearningPart,
    MicroBatches,
    MicroBatchSize,
    Models,
    OrderedSample,
    Preparation,
    RunPlace,
    ShapeClass,
    StepData,
    StepUsage,
    UseName,
    Validation,
    Values,
    Work,
)

Thing = TypeVar("Thing")
S = TypeVar("S", bound=OrderedSample)


class DomainDefaults(ABC):
    """Defaults of a domain of one model, without data to open, text beside items, kernels to try out and held-out items.

    To define: `name`, `build`, `inputs`, `values`, `data`, `batching`, `shapes`, `synthetic_batch`, `synthetic_divisors`, `tokens`, `work`,
    `describe`, `setting`, `small`. `setting` has no default: with a wrong one, measurements of another model would be used again.
    """

    gives: Collection[str] = ()
    # read where an installed package declares the domain by its class alone (mmspeed/config/tasks.py)
    config_class: ClassVar[type[RunConfig] | None] = None
    preparation_class: ClassVar[type[Preparation] | None] = None

    @abstractmethod
    def build(self) -> dict[str, nn.Module]:
        """The models by role, as `mmspeed.protocols.Domain.build`."""

    @abstractmethod
    def batching(self, place: RunPlace) -> Batching:
        """The samples of each class in a step."""

    @abstractmethod
    def shapes(self) -> Sequence[ShapeClass]:
        """The shape classes of the run."""

    @abstractmethod
    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """A synthetic batch on the device."""

    @abstractmethod
    def tokens(self, shape: ShapeClass) -> int:
        """Tokens of one item."""

    @abstractmethod
    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        """Work of the forward pass of one item."""

    def parts(self) -> Sequence[LearningPart]:
        """The single part, of the role "model"."""
        return (LearningPart(),)

    def outlines(self) -> dict[str, nn.Module]:
        """The models as `build` makes them."""
        return self.build()

    def outline_batch(self, shape: ShapeClass, items: int) -> Batch:
        """The synthetic batch on the host, with the longest text beside its items."""
        return self.synthetic_batch(shape, items, RunPlace(Device("cpu", 0)), self.longest_text())

    def largest_micro_batch(self, place: RunPlace) -> MicroBatchSize:
        """The micro-batch with the most tokens, padding included."""
        return largest_batch(self.batching(place), self.shapes(), self.tokens, place.groups)

    def cost(self, shape: ShapeClass) -> float:
        """FLOPs of forward and backward, which counts as two forward passes."""
        return 3 * self.work(shape).matmul

    def sample_cost(self, sample: OrderedSample) -> float:
        """The cost of the sample's class."""
        return self.cost(sample.bucket)

    def usage(self, step: StepData) -> StepUsage:
        """Items, real tokens, and the work of the items' classes."""
        forward = sum((self.work(shape) * count for shape, count in step.counts.items()), Work())
        return StepUsage(sum(step.counts.values()), step.tokens or 0, forward)

    def open(self, place: RunPlace) -> None:  # noqa: B027
        """Do nothing."""

    def open_without_data(self) -> None:  # noqa: B027
        """Do nothing: sizes are the config's."""

    def prepare(self, models: Models, place: RunPlace) -> None:  # noqa: B027
        """Do nothing."""

    def notes(self) -> tuple[list[str], list[str]]:
        """Empty: no notes."""
        return [], []

    def exchange_lines(self) -> list[str]:
        """Empty: no notes."""
        return []

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


def values_of(domain: Domain, models: Models, batch: Batch) -> Values:
    """The values of a batch by the first part of a domain."""
    part = domain.parts()[0]
    inputs = domain.inputs(models[part.role], batch, part)
    return domain.values(inputs.call(models[part.role]), inputs, batch)


@contextmanager
def evaluating(models: Models) -> Iterator[None]:
    """Evaluate the models without gradients inside the block; those that were in training mode go back to it."""
    training = [model for model in models.values() if model.training]
    for model in training:
        model.eval()
    with torch.no_grad():
        yield
    for model in training:
        model.train()


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
        items = min(share, most or share)
        return MicroBatchSize(shape, items, share > items, -(-share // items))
    return MicroBatchSize(shape, most or 1, batching.slots > groups, share)


def largest_batch(
    batching: Batching, shapes: Iterable[ShapeClass], tokens: Callable[[ShapeClass], int], groups: int
) -> MicroBatchSize:
    """The micro-batch with the most tokens; `accumulates` is True where a step of any class has several micro-batches."""
    usual = [usual_batch(batching, shape, groups) for shape in sorted(shapes)]
    largest = max(usual, key=lambda size: tokens(size.shape) * size.items)
    most = max(size.batches for size in usual)
    return replace(largest, accumulates=any(size.accumulates for size in usual), batches=most)


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
