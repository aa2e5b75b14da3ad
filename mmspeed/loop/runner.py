"""Runners drive the micro-batches of a step through forward and backward.

`SequentialRunner` runs one after another; a pipeline's runner will keep several in flight. Engines sum gradients over ranks, so a
loss is scaled by the step's weight over its divisor before its backward, and gradients are not divided afterwards.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspeed.errors import UserError
from mmspeed.parallel import Strategy, no_sync
from mmspeed.protocols import Batch, Divisors, MicroBatches, ShapeClass, Term, Terms, UseName

from .terms import TermKind

Call = Callable[[Batch], Any]  # the forward pass of a micro-batch: the model called with its inputs, and nothing else
TermsOf = Callable[[Any], Terms]  # of what a call returned


@dataclass
class RunRecord:
    """The terms of the micro-batches that a runner has driven, detached, and the shapes and sources of their items."""

    terms: list[dict[str, Term]] = field(default_factory=list)  # by name
    shapes: list[ShapeClass] = field(default_factory=list)
    totals: list[dict[str, Tensor]] = field(default_factory=list)  # weighted sums, by term
    weights: list[dict[str, Tensor]] = field(
        default_factory=list
    )  # sums of weights, by divisor that is not known beforehand
    disagreements: list[Tensor] = field(default_factory=list)  # of the weights of terms that share such a divisor
    sources: list[list[str]] = field(default_factory=list)
    names: list[list[UseName]] = field(default_factory=list)  # of the items' uses
    kinds: dict[str, TermKind] = field(default_factory=dict)  # by term
    # (stage of a pipeline, the greatest number of the tokens that it gave)
    handed_over: list[tuple[int, Tensor]] = field(default_factory=list)

    def total(self, name: str, device: torch.device) -> Tensor:
        """The weighted sum of a term over all micro-batches, a scalar on `device`; 0 where this rank has no such term."""
        return _sum([totals[name] for totals in self.totals if name in totals], device)

    def weight(self, divisor: str, device: torch.device) -> Tensor:
        """The sum of the weights of a divisor over all micro-batches, a scalar on `device`."""
        return _sum([weights[divisor] for weights in self.weights if divisor in weights], device)

    def disagreement(self, device: torch.device) -> Tensor:
        """The sum of the differences between terms' weights for the same late divisor; 0 at best, a scalar on `device`."""
        return _sum(self.disagreements, device)


def _sum(scalars: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(scalars).sum() if scalars else torch.zeros((), device=device)


class Runner(Protocol):
    """The driver of the micro-batches of an update."""

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        """Run forward and backward of all micro-batches; gradients are summed over ranks with the last one.

        A stage of a pipeline makes its part of `call`, and `terms` where the loss is known.
        `divisors`: the divisors of the terms' losses; None: known afterwards, and the weights are summed. `weight`: the step's, a factor of
        its gradients, which the recorded terms do not have. When the next micro-batch is
        asked for, only the terms and sources of the last one are kept. Raises UserError for a term that trains and whose divisor is
        not positive. On a pipeline stage that does not know the loss the record has no terms.
        """
        ...


@dataclass(frozen=True)
class SequentialRunner:
    """A runner of one micro-batch after another. `model`: that which learns, as wrapped by its engine."""

    model: nn.Module
    strategy: Strategy

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        record = RunRecord()
        for batch in batches:  # no enumerate: it would keep a batch alive while the next one is fetched
            with no_sync(self.model, self.strategy, last=len(record.terms) == len(batches) - 1):
                loss = noted(record, batch, terms(call(batch)), divisors, weight)
                loss.backward()
            # after backward, a graph still holds the non-tensor state of its functions, such as plans
            del batch, loss
        return record


def noted(record: RunRecord, batch: Batch, terms: Terms, divisors: Divisors, weight: float) -> Tensor:
    """Record the terms of a micro-batch; returns the scalar that is differentiated.

    Raises ValueError where none trains, or one has a divisor that the step's data does not name.
    """
    for name, term in terms.items():
        if term.divisor not in divisors:
            known = ", ".join(divisors)
            raise ValueError(f"the term '{name}' has the divisor '{term.divisor}', and the step's data has {known}")
    totals = {name: term.total() for name, term in terms.items()}
    parts = [
        totals[name] * (weight * scale_of(term.divisor, divisors[term.divisor]))
        for name, term in terms.items()
        if term.trains
    ]
    if not parts:
        raise ValueError(f"no term of {', '.join(terms) or 'the loss'} trains")
    record.terms.append({name: term.detached() for name, term in terms.items()})
    record.shapes.append(batch.shape)
    record.totals.append({name: total.detach() for name, total in totals.items()})
    late: dict[str, Term] = {}
    for term in terms.values():
        if divisors[term.divisor] is not None:
            continue
        first = late.setdefault(term.divisor, term)
        if first.weight_I is not term.weight_I:
            record.disagreements.append((first.weight_I - term.weight_I).abs().sum())
    record.weights.append({divisor: term.weight_I.sum() for divisor, term in late.items()})
    record.sources.append(batch.sources)
    record.names.append(batch.names)
    record.kinds.update({name: TermKind(term.divisor, term.trains) for name, term in terms.items()})
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def scale_of(name: str, divisor: float | None) -> float:
    """The reciprocal of a divisor; 1 for None, one that is known afterwards. Raises UserError unless it is positive and finite."""
    if divisor is None:
        return 1.0
    if not divisor > 0 or not math.isfinite(divisor):
        raise UserError(f"the step's divisor '{name}' is {divisor:g}: it has no item that counts, so it has no mean")
    return 1 / divisor
