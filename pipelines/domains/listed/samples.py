"""Samples of a list in memory: their batches, training steps and validation.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspeed.data import BatchSampler, Loader, SampleUse
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.pipelines.domains.base import SampledData, evaluating, shares, values_of
from mmspeed.protocols import (
    Batch,
    BatchShape,
    Divisors,
    Domain,
    Item,
    Models,
    NumberRule,
    RunPlace,
    ShapeClass,
    StepData,
    Term,
    Terms,
)

DivisorsOf = Callable[[Sequence["ListedSample"]], Divisors]


@dataclass(frozen=True, order=True)
class Length:
    """The shape class of samples of `numbers` tokens, real ones or padding."""

    numbers: int
    splits: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name of the class, such as `004096`."""
        return f"{self.numbers:06d}"


@dataclass(frozen=True, eq=False)
class ListedSample:
    """A sample of a list.

    Args:
        name: unique in its list; used in messages.
        tensors: the sample's tensors; in all samples of a shape class they have the same names and shapes.
        shape: the shape class.
        tokens: number of real tokens, without padding.
    """

    name: str
    tensors: Mapping[str, Tensor]
    shape: ShapeClass
    tokens: int
    dataset: ClassVar[str] = ""
    lost: ClassVar[bool] = False

    @cached_property
    def key(self) -> str:
        """The key of order, draws and fingerprints: the name and a hash of the tensors (law 5)."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return f"{self.name}-{digest.hexdigest()[:16]}"

    @property
    def bucket(self) -> ShapeClass:
        """The shape class, under the name that `OrderedSample` declares."""
        return self.shape

    @property
    def source(self) -> str:
        """The name of the sample."""
        return self.name


@dataclass(frozen=True)
class StackedSamples:
    """A maker of batches: the tensors of listed samples stacked along a new first dim."""

    rules: Mapping[str, NumberRule]

    def __call__(self, draws: Sequence[tuple[SampleUse[ListedSample], float]]) -> Batch:
        samples = [draw.sample for draw, _ in draws]
        return Batch(
            {name: torch.stack([sample.tensors[name] for sample in samples]) for name in samples[0].tensors},
            [_item(draw) for draw, _ in draws],
            torch.tensor([weight for _, weight in draws], dtype=torch.float32),
            samples[0].shape,
            self.rules,
        )

    def shape(self, draws: Sequence[tuple[SampleUse[ListedSample], float]]) -> BatchShape:
        """The shapes of the batch, from those of its first sample."""
        first, size = draws[0][0].sample, len(draws)
        return BatchShape(first.shape, size, {name: (size, *tensor.shape) for name, tensor in first.tensors.items()})


class ListedData(SampledData[ListedSample]):
    """The order of a list's samples, with their divisors and real tokens."""

    def __init__(
        self,
        sampler: BatchSampler[ListedSample],
        loader: Loader,
        by_key: Mapping[str, ListedSample],
        divisors: DivisorsOf,
        weights: StepWeights | None = None,
    ) -> None:
        super().__init__(sampler, loader, weights)
        self.by_key, self.divisors = by_key, divisors

    def measure(self, step: StepData) -> StepData:
        """The step with the task's divisors and its samples' real tokens."""
        samples = [self.by_key[item.sample] for item in step.items if not item.left_out]
        if not samples:
            return step
        return replace(step, divisors=self.divisors(samples), tokens=real_tokens(samples))


class ListedValidation:
    """The mean of a loss's terms over held-out samples, at most `most` at a time; each counts on the rank that leads its group."""

    def __init__(
        self,
        domain: Domain,
        divisors: DivisorsOf,
        samples: Sequence[ListedSample],
        collate: StackedSamples,
        most: int | None,
        place: RunPlace,
    ) -> None:
        self._domain, self._divisors, self.samples = domain, divisors, samples
        self._collate, self._most, self._place = collate, most, place
        self._trained: set[str] = set()

    def measure(self, models: Models) -> Terms:
        """The terms of this rank's samples."""
        device = self._place.device.torch_device
        with evaluating(models):
            values = [values_of(self._domain, models, batch.to(device, torch.float32)) for batch in self._batches()]
            terms_of_batches = [{"loss": each.loss, **each.own()} for each in values]
        terms = {name: _joined([each[name] for each in terms_of_batches]) for name in terms_of_batches[0]}
        self._trained = {name for name, term in terms.items() if term.trains}
        return terms

    def _batches(self) -> list[Batch]:
        """Batches of held-out samples, equally many on every rank; fillers, and samples on ranks that do not lead, have the weight 0."""
        by_shape: defaultdict[ShapeClass, list[ListedSample]] = defaultdict(list)
        for sample in self.samples:
            by_shape[sample.shape].append(sample)
        batches = []
        for _, samples in sorted(by_shape.items()):
            samples_here = shares(samples, self._place)
            most = self._most or len(samples_here)
            for part in (samples_here[start : start + most] for start in range(0, len(samples_here), most)):
                weights = [float(real and self._place.leads) for _, real in part]
                uses = [SampleUse(sample, 0, 0) for sample, _ in part]
                batches.append(self._collate(list(zip(uses, weights, strict=True))))
        return batches

    def divisors(self) -> Divisors:
        """The divisors of all held-out samples."""
        return self._divisors(self.samples)

    def row(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The sum of the terms that train, the terms where there are several, and the number of samples."""
        row: dict[str, Any] = {"loss": sum(values[name] for name in values if name in self._trained)}
        if len(values) > 1:
            row["terms"] = dict(values)
        return row | {"samples": len(self.samples)}

    def sample(self, models: Models, step: int) -> None:
        """Do nothing: there are no samples to draw."""


def real_tokens(samples: Iterable[ListedSample]) -> int:
    """The tokens of samples, without padding."""
    return sum(sample.tokens for sample in samples)


def _item(draw: SampleUse[ListedSample]) -> Item:
    return Item(*draw.name, draw.sample.source, draw.sample.shape.name)


def _joined(terms: Sequence[Term]) -> Term:
    """A single term of the items of several."""
    return replace(
        terms[0],
        loss_I=torch.cat([term.loss_I for term in terms]),
        weight_I=torch.cat([term.weight_I for term in terms]),
    )
