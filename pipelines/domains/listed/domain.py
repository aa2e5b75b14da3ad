"""`ListedDomain`: a base class of tasks whose samples are a list in memory; a subclass defines its model, loss, samples and work.

Order of steps, resuming, sharing over ranks, batching by cost and prefetching are those of every task (`BatchSampler`, `Loader`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from mmspeed.config import RunConfig
from mmspeed.config.training import BatchingConfig
from mmspeed.data import Batching, BatchSampler, Loader, SampleUse
from mmspeed.data.sampling.batch_sizes import SampleCosts, costs_of_samples, make_batching
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.base import DomainDefaults
from mmspeed.pipelines.domains.listed.samples import (
    Length,
    ListedData,
    ListedSample,
    ListedValidation,
    StackedSamples,
    real_tokens,
)
from mmspeed.protocols import (
    Batch,
    Data,
    Divisors,
    Given,
    Inputs,
    LearningPart,
    Models,
    NumberRule,
    OrderedSample,
    RunPlace,
    ShapeClass,
    SmallRun,
    StepData,
    StepUsage,
    Validation,
    Values,
    Work,
)

__all__ = ["Length", "ListedDomain", "ListedSample"]

C = TypeVar("C", bound=RunConfig)


class ListedDomain(DomainDefaults, Generic[C]):
    """A task whose samples are a list in memory.

    A subclass defines `name`, `build`, `inputs`, `values`, `samples` and `work`. Terms may have the divisors "samples", "units" and "tokens",
    or those of an overridden `divisors`. Random draws of a sample are made in `inputs`, keyed by the batch's `names`.
    """

    name: str
    rules: ClassVar[
        Mapping[str, NumberRule]
    ] = {}  # what happens to the number type of a sample's tensor; none: it is kept

    def __init__(self, config: C, maker: object = None) -> None:
        self.config = config

    # -- to define --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(
        self, model: nn.Module, batch: Batch, part: LearningPart, entry: str | None = None, given: Given | None = None
    ) -> Inputs:
        """The arguments of the model, and what `values` needs of the batch, as `mmspeed.protocols.Domain.inputs`."""

    @abstractmethod
    def values(self, output: Any, inputs: Inputs, batch: Batch) -> Values:
        """The values of the model's output; validation is the mean of the same terms."""

    @abstractmethod
    def samples(self) -> tuple[Sequence[ListedSample], Sequence[ListedSample]]:
        """(training samples, held-out samples). Called once."""

    # -- to override ------------------------------------------------------------------------------------------------------

    def tokens(self, shape: ShapeClass) -> int:
        """The size of the class."""
        return shape.numbers

    def sample_work(self, sample: ListedSample) -> Work:
        """Work of the forward pass of this sample, such as a pack of documents; that of its class where all cost the same."""
        return self.work(sample.shape)

    def cost(self, shape: ShapeClass) -> float:
        """The mean cost of the class's training samples."""
        return self._costs.flops(shape)

    def sample_cost(self, sample: OrderedSample) -> float:
        """The cost of a training sample: three forward passes, since backward counts as two."""
        return _training_cost(self.sample_work(self.by_key[sample.key]))

    def divisors(self, samples: Sequence[ListedSample]) -> Divisors:
        """The divisors of a step of these samples: their number and their real tokens. None: known after the step only."""
        count = float(len(samples))
        return {"samples": count, "units": count, "tokens": float(real_tokens(samples))}

    # -- samples ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _lists(self) -> tuple[list[ListedSample], list[ListedSample]]:
        training, held_out = map(list, self.samples())
        for samples in (training, held_out):
            twice = [name for name, count in Counter(sample.name for sample in samples).items() if count > 1]
            if twice:
                raise UserError(f"two samples of the task {self.name} have the name {twice[0]!r}")
        if not training:
            raise UserError(f"the task {self.name} has no samples to train on")
        return training, held_out

    @property
    def training(self) -> list[ListedSample]:
        """The samples to train on. Raises UserError where there is none, or two have one name."""
        return self._lists[0]

    @property
    def held_out(self) -> list[ListedSample]:
        """The first `validate.samples` of those that are held out."""
        return self._lists[1][: self.config.validate_.samples]

    @cached_property
    def by_key(self) -> dict[str, ListedSample]:
        """The training samples by their keys."""
        return {sample.key: sample for sample in self.training}

    def shapes(self) -> Sequence[ShapeClass]:
        """The classes of the training samples."""
        return sorted({sample.shape for sample in self.training})

    def batching(self, place: RunPlace) -> Batching:
        """The samples of each class in a step. Raises UserError for batching by measured time, which only videos have."""
        config = self.config
        if config.batching.by == "time":
            raise UserError(
                f"batching.by: time is not available for the task {self.name}: use samples, tokens or flops"
            )
        return make_batching(config.batching, config.train, self.shapes(), self._costs, place.dealt, config.parallel)

    @cached_property
    def _costs(self) -> SampleCosts:
        """The costs of classes, as means of their samples, and of single samples."""
        by_class = SampleCosts(self.tokens, lambda shape: _training_cost(self.work(shape)))
        return costs_of_samples(by_class, self.training, self.sample_cost)

    def data(self, place: RunPlace) -> ListedData:
        """Each epoch's samples in an order drawn by its number, and this rank's share of each step."""
        train = self.config.train
        sampler = BatchSampler(self.training, self.batching(place), self.config.seed)
        loader = Loader(
            sampler,
            rank=place.number,
            world=place.dealt,
            prefetch=train.prefetch,
            workers=train.loader_workers,
            device=place.device,
            collate=StackedSamples(self.rules),
        )
        weights = StepWeights(self.config.weighting, sampler, self._mean_tokens.__getitem__)
        return ListedData(sampler, loader, self.by_key, self.divisors, weights)

    @cached_property
    def _mean_tokens(self) -> dict[ShapeClass, float]:
        """The mean real tokens of each class's training samples."""
        by_class: defaultdict[ShapeClass, list[ListedSample]] = defaultdict(list)
        for sample in self.training:
            by_class[sample.shape].append(sample)
        return {shape: real_tokens(samples) / len(samples) for shape, samples in by_class.items()}

    def batch_of(self, samples: Sequence[ListedSample]) -> Batch:
        """The batch of samples of one class, each with weight 1."""
        return StackedSamples(self.rules)([(SampleUse(sample, 0, 0), 1.0) for sample in samples])

    def _some(self, shape: ShapeClass, items: int) -> list[ListedSample]:
        """The first `items` training samples of a class, repeated where it has fewer."""
        return list(islice(cycle([sample for sample in self.training if sample.shape == shape]), items))

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """The first training samples of the class, on the device."""
        return self.batch_of(self._some(shape, items)).to(place.device.torch_device, torch.float32)

    def synthetic_divisors(self, batch: Batch, batches: int) -> Divisors:
        """The divisors of `batches` times the batch's samples."""
        one = self.divisors([self.by_key[item.sample] for item in batch.items])
        return {name: None if value is None else value * batches for name, value in one.items()}

    # -- looking at a run --------------------------------------------------------------------------------------------------

    def usage(self, step: StepData) -> StepUsage:
        """Samples, real tokens, and the work of all samples, by `sample_work`."""
        works = Counter(self.sample_work(self.by_key[item.sample]) for item in step.items)
        forward = sum((work * count for work, count in works.items()), Work())
        return StepUsage(sum(step.counts.values()), step.tokens or 0, forward)

    def describe(self, step: StepData) -> dict[str, Any]:
        """Samples and real tokens."""
        return {"samples": sum(step.counts.values()), "tokens": step.tokens}

    def notes(self) -> tuple[list[str], list[str]]:
        """A line with the number of samples."""
        return [f"{len(self.training):,} samples to train on, {len(self.held_out):,} held out"], []

    def setting(self) -> dict[str, Any]:
        """The config's keys that are the task's own."""
        keys = type(self.config).model_fields.keys() - RunConfig.model_fields.keys()
        return dict(_flat("", self.config.model_dump(mode="json", include=keys)))

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """The mean of the loss's terms over the held-out samples; None where there are none."""
        if not self.held_out:
            return None
        most = self.config.train.micro_batch_size
        return ListedValidation(self, self.divisors, self.held_out, StackedSamples(self.rules), most, place)

    def small(self, folder: Path) -> SmallRun:
        """The task itself, at its own size: its first step is of the same samples at any layout."""
        sizes = ", ".join(f"{key} {value}" for key, value in self.setting().items())
        config = self.config.model_copy(update={"batching": BatchingConfig(), "output": str(folder)})
        count = min(config.train.samples_per_step, len(self.training))
        return SmallRun(config, f"as it is, {sizes}", items=[f"a step of {count} of its samples"])


def _training_cost(forward: Work) -> float:
    return 3 * forward.matmul


def _flat(prefix: str, tree: Mapping[str, Any]) -> Generator[tuple[str, Any], None, None]:
    """The leaves of nested sections, under dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value
