"""Validation while a run trains, with the averaged weights."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from mmspeed.log import get_logger
from mmspeed.loop.terms import reduce_terms
from mmspeed.pipelines.run.assembly import Assembly
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Data, RunPlace

log = get_logger("validate")


class Validator:
    """The validation and sampling of a run; the task decides on the items and the method."""

    def __init__(self, task: Task, parts: Assembly, data: Data, place: RunPlace) -> None:
        self.parts, self.place = parts, place
        self.validation = task.domain.validation(parts.models, data, place)

    def validate(self, step: int) -> dict[str, Any]:
        """Validate and sample. Returns a row for metrics.jsonl, empty where there is no validation. A collective call."""
        if self.validation is None:
            return {}
        started = time.monotonic()
        row: dict[str, Any] = {"kind": "validation", "step": step}
        models = self.parts.models
        self.parts.wake()
        with contextlib.ExitStack() as swapped:
            for role, ema in self.parts.averages.items():
                swapped.enter_context(ema.swap(models[role]))
            values = reduce_terms(self.validation.measure(models), self.validation.divisors())
            if values:
                row |= self.validation.row(values)
            self.validation.sample(models, step)
        row["seconds"] = time.monotonic() - started
        if self.place.rank == 0 and "loss" in row:
            log.info(f"step {step}: held-out loss {row['loss']:.4f} on {row.get('samples', '?')} samples")
        return row
