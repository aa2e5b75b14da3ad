"""Means over the steps since the last row: of loss, gradient norm and terms, and of the loss by bucket and by quarter of the times.

What every rank knows is summed at once. Losses of items stay where they were computed until the next row, where the ranks add their
sums in one exchange.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspeed.protocols import ShapeClass, Term

from .callbacks import BaseCallback, StepOutcome, SumOverRanks
from .runner import RunRecord

QUARTERS = 4
MOST_WAITING = 1024  # terms of micro-batches whose losses wait on the device


@dataclass
class Mean:
    """A weighted mean; that of one value is this value to the bit."""

    value: float = float("nan")
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self.weight += weight
        self.value = value if self.weight == weight else self.value + (value - self.value) * (weight / self.weight)


@dataclass
class _ItemSums:
    """Sums of loss x weight and of weights of a term, on this rank: by bucket, and by quarter of the times."""

    by_bucket: dict[ShapeClass, list[float]] = field(default_factory=dict)
    by_quarter: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(QUARTERS)])


class StepMeans(BaseCallback):
    """The means since the last row, in which a step counts by its weight in the objective; steps that were not finite or not applied do
    not count.

    `window`: the number of steps of the mean in `recent`. `several`: a step makes several updates, whose terms are always named.
    """

    def __init__(self, sum_over_ranks: SumOverRanks, window: int, several: bool = False) -> None:
        self.sum, self.several = sum_over_ranks, several
        self.recent_losses: deque[float] = deque(maxlen=window)
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        self._loss, self._norm = Mean(), Mean()
        self._terms: dict[str, Mean] = {}
        self._buckets: set[ShapeClass] = set()  # of all ranks, as are the terms that train
        self._trained: set[str] = set()
        self._waiting: list[tuple[ShapeClass, str, Term]] = []
        self._items: dict[str, _ItemSums] = {}  # by term that trains

    @property
    def recent(self) -> float | None:
        """The mean loss of the last steps; None before the first."""
        return sum(self.recent_losses) / len(self.recent_losses) if self.recent_losses else None

    def after_step(self, outcome: StepOutcome) -> None:
        result = outcome.result
        if result is None or not result.finite or result.withheld:
            return
        weight = outcome.data.weight
        self.steps += 1
        self.recent_losses.append(result.loss)
        self._loss.add(result.loss, weight)
        self._norm.add(result.grad_norm, weight)
        for name, value in result.terms.items():
            self._terms.setdefault(name, Mean()).add(value, weight)
        self._buckets.update(outcome.data.counts)
        self._trained.update(result.trained)
        if result.record is not None:
            self._wait(result.record)

    def _wait(self, record: RunRecord) -> None:
        for shape, terms in zip(record.shapes, record.terms, strict=True):
            self._waiting += [(shape, name, term) for name, term in terms.items() if term.trains]
        if len(self._waiting) > MOST_WAITING:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add the losses that wait on the device, which are copied from it at once."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        losses = _on_host([term.loss_I for _, _, term in waiting])
        weights = _on_host([term.weight_I for _, _, term in waiting])
        own_units = [term.units_I for _, _, term in waiting if term.units_I is not None]
        units = iter(_on_host(own_units) if own_units else ())
        for (shape, name, term), loss_I, weight_I in zip(waiting, losses, weights, strict=True):
            sums = self._items.setdefault(name, _ItemSums())
            counts = weight_I != 0  # the loss of a filler may be anything
            # the same way for any number of items, so that sums of the same items are equal
            parts = torch.stack([torch.where(counts, loss_I * weight_I, 0.0), weight_I])
            if term.units_I is not None:
                parts[1] *= next(units)
            _add(sums.by_bucket.setdefault(shape, [0.0, 0.0]), parts.sum(dim=1))
            if term.time_I is not None:
                quarter_I = (term.time_I.double().cpu() * QUARTERS).long().clamp(0, QUARTERS - 1)
                for quarter in range(QUARTERS):
                    _add(sums.by_quarter[quarter], parts[:, quarter_I == quarter].sum(dim=1))

    def row(self) -> dict[str, object]:
        """The means since the last call: `steps`, `loss`, `grad_norm`, `terms`, `by_bucket`, `by_quarter`.

        A collective call, which resets them.
        """
        self._add_waiting()
        names, buckets = sorted(self._trained), sorted(self._buckets, key=str)
        none = _ItemSums()
        numbers: list[float] = []
        for name in names:
            sums = self._items.get(name, none)
            for pair in [*(sums.by_bucket.get(bucket, [0.0, 0.0]) for bucket in buckets), *sums.by_quarter]:
                numbers += pair
        totals = self.sum(numbers) if numbers else []
        means = [_mean(total, weight) for total, weight in zip(totals[::2], totals[1::2], strict=True)]
        each = len(buckets) + QUARTERS  # means of a term
        columns = [_sum([means[term * each + place] for term in range(len(names))]) for place in range(each)]
        quarters = columns[len(buckets) :]
        means_of_row: dict[str, object] = {
            "steps": self.steps,
            "loss": self._loss.value,
            "grad_norm": self._norm.value,
            "by_bucket": {str(b): value for b, value in zip(buckets, columns, strict=False) if value is not None},
            "by_quarter": quarters if any(value is not None for value in quarters) else [],
        }
        if self.several or len(self._terms) > 1:
            means_of_row["terms"] = {name: mean.value for name, mean in self._terms.items()}
        self._clear()
        return means_of_row


def _on_host(tensors_I: list[Tensor]) -> list[Tensor]:
    """Tensors of all micro-batches in float64 on the CPU, by one copy from their device."""
    sizes = [tensor.numel() for tensor in tensors_I]
    device = tensors_I[0].device
    return list(torch.cat([tensor.to(device).flatten() for tensor in tensors_I]).cpu().double().split(sizes))


def _add(sums: list[float], values: Tensor) -> None:
    for place, value in enumerate(values.tolist()):
        sums[place] += value


def _mean(total: float, weight: float) -> float | None:
    return total / weight if weight > 0 else None


def _sum(values: list[float | None]) -> float | None:
    """The sum of the means that there are; None where there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
