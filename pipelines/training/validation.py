"""What is looked at while a run trains, from the averaged weights."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from mmspeed import comm
from mmspeed.log import get_logger
from mmspeed.pipelines.run.build import Assembly
from mmspeed.protocols import Data, Divisors, RunPlace, Task, Terms

log = get_logger("validate")


class Validator:
    """Validates and samples for a run; which items and how is the task's."""

    def __init__(self, task: Task, parts: Assembly, data: Data, place: RunPlace) -> None:
        self.parts, self.place = parts, place
        self.validation = task.validation(parts.models, data, place)

    def validate(self, step: int) -> dict[str, Any]:
        """One row for metrics.jsonl, or an empty one when there is nothing to look at. A collective call."""
        if self.validation is None:
            return {}
        started = time.monotonic()
        row: dict[str, Any] = {"kind": "validation", "step": step}
        models = self.parts.models
        with contextlib.ExitStack() as swapped:
            for role, ema in self.parts.averages.items():
                swapped.enter_context(ema.swap(models[role]))
            terms = self.validation.measure(models)
            if terms:
                row |= self.validation.row(reduce_terms(terms, self.validation.divisors()))
            self.validation.sample(models, step)
        row["seconds"] = time.monotonic() - started
        if self.place.rank == 0 and "loss" in row:
            log.info(f"step {step}: held-out loss {row['loss']:.4f} on {row.get('samples', '?')} samples")
        return row


def reduce_terms(terms: Terms, divisors: Divisors) -> dict[str, float]:
    """Each term summed over the items of all ranks in float64, over its divisor; None: the sum of its weights. A collective call."""
    sums: list[float] = []
    for term in terms.values():
        losses, weights = term.loss_I.tolist(), term.weight_I.tolist()
        sums += [sum(loss * weight for loss, weight in zip(losses, weights, strict=True)), sum(weights)]
    totals = comm.all_reduce_sum(sums)
    values = {}
    for place, (name, term) in enumerate(terms.items()):
        divisor = divisors[term.divisor]
        values[name] = totals[2 * place] / (totals[2 * place + 1] if divisor is None else divisor)
    return values
