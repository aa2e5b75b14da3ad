"""Runners drive the micro-batches of a step through forward and backward.

`SequentialRunner` takes one after another; a pipeline's runner will keep several under way. Engines sum gradients over ranks, so a
loss is scaled by one over the step's divisor before its backward, and nothing is divided afterwards.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from mmspeed.parallel import Strategy, no_sync
from mmspeed.protocols import Batch, MicroBatches, Terms

Forward = Callable[[Batch], Terms]
Scales = Mapping[str, "float | None"]


@dataclass
class RunRecord:
    """The terms of the micro-batches that a runner has driven, detached, and the sources of their items."""

    losses: list[dict[str, Tensor]] = field(default_factory=list)  # (I,) by term
    totals: list[dict[str, Tensor]] = field(default_factory=list)  # weighted sums, by term
    weights: list[dict[str, Tensor]] = field(
        default_factory=list
    )  # sums of weights, by divisor that is not known beforehand
    sources: list[list[str]] = field(default_factory=list)
    divisors: dict[str, str] = field(default_factory=dict)  # of each term
    trained: set[str] = field(default_factory=set)  # terms

    def total(self, name: str, device: torch.device) -> Tensor:
        """The weighted sum of a term over all micro-batches, a scalar on `device`; 0 where the term was not met here."""
        return _sum([totals[name] for totals in self.totals if name in totals], device)

    def weight(self, divisor: str, device: torch.device) -> Tensor:
        """The sum of the weights of a divisor over all micro-batches, as `total`."""
        return _sum([weights[divisor] for weights in self.weights if divisor in weights], device)


def _sum(scalars: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(scalars).sum() if scalars else torch.zeros((), device=device)


class Runner(Protocol):
    """Drives the micro-batches of one update."""

    def run(self, forward: Forward, batches: MicroBatches, scales: Scales) -> RunRecord:
        """Forward and backward of all micro-batches; gradients are summed over ranks with the last one.

        `scales`: by divisor, what the losses of its terms are multiplied by; None: the divisor is known afterwards, and the weights
        are summed. Of a micro-batch nothing but its terms and sources is kept
        when the next one is asked for. On a pipeline stage that does not know the loss the record has no terms.
        """
        ...


@dataclass(frozen=True)
class SequentialRunner:
    """Drives one micro-batch after another. `models` are those that learn, as their engines wrap them."""

    models: Sequence[nn.Module]
    strategy: Strategy

    def run(self, forward: Forward, batches: MicroBatches, scales: Scales) -> RunRecord:
        record = RunRecord()
        for batch in batches:  # no enumerate: it would hold on to a batch while the next is waited for
            with ExitStack() as stack:
                last = len(record.losses) == len(batches) - 1
                for model in self.models:
                    stack.enter_context(no_sync(model, self.strategy, last=last))
                terms = forward(batch)
                loss = self._note(record, batch, terms, scales)
                loss.backward()
            # a graph that has run still holds what its functions keep beside tensors, such as plans
            del batch, terms, loss
        return record

    @staticmethod
    def _note(record: RunRecord, batch: Batch, terms: Terms, scales: Scales) -> Tensor:
        """Record the terms of a micro-batch; returns the scalar that is differentiated.

        Raises ValueError where none trains, or one has a divisor that the step's data does not name.
        """
        for name, term in terms.items():
            if term.divisor not in scales:
                known = ", ".join(scales)
                raise ValueError(f"the term '{name}' has the divisor '{term.divisor}', and the step's data has {known}")
        totals = {name: term.total() for name, term in terms.items()}
        parts = [totals[name] * (scales[term.divisor] or 1.0) for name, term in terms.items() if term.trains]
        if not parts:
            raise ValueError(f"no term of {', '.join(terms) or 'the loss'} trains")
        record.losses.append({name: term.loss_I.detach() for name, term in terms.items()})
        record.totals.append({name: total.detach() for name, total in totals.items()})
        late = {term.divisor: term.weight_I for term in terms.values() if scales[term.divisor] is None}
        record.weights.append({divisor: weight_I.sum() for divisor, weight_I in late.items()})
        record.sources.append(batch.sources)
        record.divisors.update({name: term.divisor for name, term in terms.items()})
        record.trained.update(name for name, term in terms.items() if term.trains)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
