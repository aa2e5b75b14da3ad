"""Packs of documents as batches, training steps and held-out losses.

Legend: B packs of a micro-batch, N tokens of a pack, Z one more than documents, T = B x N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.data import Loader, SampleUse
from mmspeed.data.loading.loader import DrawnItems
from mmspeed.data.sampling.pack_order import PackLength, PackSample, PackSampler
from mmspeed.data.sampling.pack_stages import StagedPacks
from mmspeed.data.sampling.weighting import StepWeights
from mmspeed.pipelines.domains.base import SampledData, evaluating, shares, values_of
from mmspeed.protocols import (
    Batch,
    BatchShape,
    DataSize,
    Divisors,
    Domain,
    Item,
    Models,
    RunPlace,
    StepData,
    Term,
    Terms,
)

Array = npt.NDArray[Any]
PackDraws = Sequence[tuple[SampleUse[PackSample], float]]


class DocumentReader(Protocol):
    """Documents of token ids, as `mmspeed.data.cache.text_cache.TextCache` holds them."""

    lengths: Array
    held_out: npt.NDArray[np.bool_]
    source: Array
    sources: list[str]

    @property
    def marked(self) -> bool:
        """False where all ids of all documents have a loss."""
        ...

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> Array:
        """The ids [begin, begin + count) of a document."""
        ...

    def ids_of(self, pieces: Iterable[tuple[int, int, int]]) -> list[Array]:
        """The ids of ranges (document, begin, count)."""
        ...

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.bool_] | None:
        """Marks of the ids that have a loss; None where all have."""
        ...

    def targets(self, document: Array, begin: Array, count: Array) -> Array:
        """The number of ids of each range that have a loss and an id before them in the range."""
        ...


def targets_of(documents: DocumentReader, sample: PackSample) -> int:
    """The number of tokens of a pack that are predicted: all with a loss but the first of each range."""
    if not documents.marked:
        return sample.tokens - len(sample.pieces)
    return sum(targets_in(documents, *piece) for piece in sample.pieces)


def targets_in(documents: DocumentReader, document: int, begin: int, count: int) -> int:
    """The number of tokens of a range that are predicted."""
    marks = documents.trained(document, begin, count)
    return count - 1 if marks is None else int(marks[1:].sum())


@dataclass(frozen=True)
class PackCollate:
    """A maker of batches of packs: `ids` and `targets` (B, N), and the cumulative lengths of documents `bounds` (Z,).

    Places behind a pack's last token are a document of their own, with ids 0 and no targets. `counted` (B, N) is True at all other places
    of packs that have a weight.
    """

    documents: DocumentReader

    def __call__(self, draws: PackDraws) -> Batch:
        samples = [draw.sample for draw, _ in draws]
        rows, length = len(samples), samples[0].shape.numbers
        parts, bounds = list[Array](), bounds_of(samples)
        read = iter(self.documents.ids_of([piece for sample in samples for piece in sample.pieces]))
        for sample in samples:
            parts += islice(read, len(sample.pieces))
            if sample.tokens < length:
                parts.append(np.zeros(length - sample.tokens, np.uint8))
        ids_T = np.concatenate(parts, dtype=np.int64)
        target_T, bounds_Z = np.empty_like(ids_T), np.array(bounds, np.int32)
        target_T[:-1] = ids_T[1:]
        target_T[bounds_Z[1:] - 1] = IGNORED  # the last place, too
        counted_BN = np.ones((rows, length), np.bool_)
        for row, (sample, (_, weight)) in enumerate(zip(samples, draws, strict=True)):
            end = row * length + sample.tokens
            target_T[end : (row + 1) * length] = IGNORED
            counted_BN[row, sample.tokens if weight > 0 else 0 :] = False
            if self.documents.marked:
                self._leave_out(sample, target_T[row * length : end])
        tensors = {
            "ids": torch.from_numpy(ids_T).view(rows, length),
            "targets": torch.from_numpy(target_T).view(rows, length),
            "bounds": torch.from_numpy(bounds_Z),
            "counted": torch.from_numpy(counted_BN),
        }
        items = [Item(*draw.name, draw.sample.source, draw.sample.shape.name) for draw, _ in draws]
        weights = torch.from_numpy(np.array([weight for _, weight in draws], np.float32))
        return Batch(tensors, items, weights, samples[0].shape)

    def _leave_out(self, sample: PackSample, target_N: Array) -> None:
        """Leave out the targets of a pack that have no loss."""
        start = 0
        for document, begin, count in sample.pieces:
            marks = self.documents.trained(document, begin, count)
            if marks is not None:
                target_N[start : start + count - 1][~marks[1:]] = IGNORED
            start += count

    def shape(self, draws: PackDraws) -> BatchShape:
        """The shapes of the batch, from its packs' ranges."""
        samples = [draw.sample for draw, _ in draws]
        rows = len(samples), samples[0].shape.numbers
        shapes = {"ids": rows, "targets": rows, "counted": rows, "bounds": (len(bounds_of(samples)),)}
        return BatchShape(samples[0].shape, rows[0], shapes)


def bounds_of(samples: Sequence[PackSample]) -> list[int]:
    """Cumulative lengths of the documents of packs that follow one another, padding included as a document."""
    counts = []
    for sample in samples:
        counts += [count for _, _, count in sample.pieces]
        if sample.tokens < sample.shape.numbers:
            counts.append(sample.shape.numbers - sample.tokens)
    return list(accumulate(counts, initial=0))


class LanguageData(SampledData[PackSample]):
    """The order of a language run's packs, with target tokens and real tokens as divisors."""

    def __init__(
        self, documents: DocumentReader, sampler: PackSampler | StagedPacks, loader: Loader, weights: StepWeights | None
    ) -> None:
        super().__init__(sampler, loader, weights)
        self.documents, self.order = documents, sampler

    @property
    def size(self) -> DataSize:
        return replace(super().size, left_out=self.order.without_targets)

    def measure(self, step: StepData) -> StepData:
        """The step with its packs, target tokens and real tokens."""
        samples = packs_of(step)
        if not samples:
            return step
        targets = sum(targets_of(self.documents, sample) for sample in samples)
        tokens = sum(sample.tokens for sample in samples)
        divisors = {"samples": float(len(samples)), "tokens": float(max(targets, 1)), "real_tokens": float(tokens)}
        divisors["units"] = float(sum(len(sample.pieces) for sample in samples))
        return replace(step, divisors=divisors, tokens=tokens)


def packs_of(step: StepData) -> list[PackSample]:
    """The packs of a step over all ranks, without left out ones."""
    assert isinstance(step.items, DrawnItems)
    return [draw.sample for draw in step.items.draws if not draw.left_out]


class HeldOutPacks:
    """The mean loss of a target token over packs of held-out documents, of each source too."""

    def __init__(
        self,
        domain: Domain,
        documents: DocumentReader,
        samples: Mapping[str, Sequence[PackSample]],
        most: int,
        place: RunPlace,
    ) -> None:
        self._domain, self._documents, self._samples = domain, documents, samples
        self._most, self._place, self._collate = most, place, PackCollate(documents)

    def measure(self, models: Models) -> Terms:
        """A term `loss` of all packs, and one of each source."""
        device = self._place.device.torch_device
        terms: dict[str, Term] = {}
        with evaluating(models):
            for source, samples in self._samples.items():
                mine = shares(samples, self._place)
                losses, weights = [], []
                for part in (mine[start : start + self._most] for start in range(0, len(mine), self._most)):
                    draws = [(SampleUse(sample, 0, 0), float(real and self._place.leads)) for sample, real in part]
                    term = values_of(self._domain, models, self._collate(draws).to(device, torch.float32)).loss
                    losses.append(term.loss_I)
                    weights.append(term.weight_I)
                terms[source] = Term(torch.cat(losses), torch.cat(weights), source)
        return terms

    @cached_property
    def _targets(self) -> dict[str, float]:
        """The target tokens of each source."""
        return {
            source: float(max(1, sum(targets_of(self._documents, sample) for sample in samples)))
            for source, samples in self._samples.items()
        }

    def divisors(self) -> Divisors:
        """The target tokens of each source."""
        return dict(self._targets)

    def row(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Loss and perplexity of a token over all held-out documents, and of each source."""
        tokens = self._targets
        total = sum(tokens[name] for name in values)
        loss = sum(values[name] * tokens[name] for name in values) / total
        row: dict[str, Any] = {"loss": loss, "perplexity": float(np.exp(min(loss, 700.0))), "tokens": int(total)}
        row["samples"] = sum(map(len, self._samples.values()))
        if len(values) > 1:
            row["sources"] = {
                name: {"loss": value, "perplexity": float(np.exp(min(value, 700.0)))} for name, value in values.items()
            }
        return row

    def sample(self, models: Models, step: int) -> None:
        """Do nothing: texts are sampled from checkpoints."""


def held_out_packs(documents: DocumentReader, length: int, most: int) -> dict[str, list[PackSample]]:
    """At most `most` packs of each source's held-out documents: first all beginnings of `length` tokens, then what follows them.

    Ranges of a single token predict nothing and are left out, as are packs in which nothing is predicted.
    """

    def predicted(pieces: list[tuple[int, int, int]]) -> bool:
        return not documents.marked or any(targets_in(documents, *piece) for piece in pieces)

    by_source: dict[str, list[PackSample]] = {}
    for number, source in enumerate(documents.sources):
        mine = np.flatnonzero(documents.held_out & (documents.source == number) & (documents.lengths > 1))
        packs: list[list[tuple[int, int, int]]] = []
        room = 0
        for piece in _pieces(mine, documents.lengths[mine].astype(np.int64), length):
            if piece[2] > room:
                if packs and not predicted(packs[-1]):
                    packs.pop()
                if len(packs) == most:
                    break
                packs.append([])
                room = length
            packs[-1].append(piece)
            room -= piece[2]
        packs = packs if packs and predicted(packs[-1]) else packs[:-1]
        if packs:
            by_source[source] = [
                PackSample(f"held out {source} {place}", tuple(pieces), PackLength(length))
                for place, pieces in enumerate(packs)
            ]
    return by_source


def _pieces(documents: Array, lengths: Array, length: int) -> Iterator[tuple[int, int, int]]:
    """Ranges (document, begin, count) of at most `length` tokens, level by level."""
    for begin in range(0, int(lengths.max(initial=0)), length):
        for document, left in zip(documents.tolist(), (lengths - begin).tolist(), strict=True):
            if left > 1:
                yield document, begin, min(left, length)


def tokens_by_source(documents: DocumentReader, samples: Sequence[PackSample]) -> dict[str, int]:
    """Real tokens of packs by their sources."""
    met: Counter[str] = Counter()
    for sample in samples:
        for document, _, count in sample.pieces:
            met[documents.sources[int(documents.source[document])]] += count
    return dict(sorted(met.items()))
