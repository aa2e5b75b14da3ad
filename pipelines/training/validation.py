"""Validation while a run trains, with the averaged weights."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.log import Working, get_logger
from mmspeed.loop.terms import reduce_terms
from mmspeed.pipelines.report.run_page import write_report
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.run.telemetry import Telemetry
from mmspeed.pipelines.training.events import Events
from mmspeed.pipelines.training.run_state import Run

log = get_logger("validate")


class Validator:
    """The validation and sampling of a run; the task decides on the items and the method."""

    def __init__(self, config: RunConfig, run: Run, telemetry: Telemetry, events: Events) -> None:
        self.config, self.run, self.telemetry, self.events = config, run, telemetry, events
        self.folder = RunFolder(config.run_dir)
        with Working("preparing validation", tell=False):
            self.validation = run.task.domain.validation(run.parts.models, run.data, run.place)

    def validate(self, step: int) -> bool:
        """Validate and sample. True where the held-out loss is the lowest so far, so that this step is worth a checkpoint."""
        row = self._row(step)
        if row:
            self.telemetry.write(dict(row))
            self.events.validated(row)
            if self.run.place.rank == 0 and self.config.validate_.report:
                write_report(self.folder.root)
        if self.config.trackers and self.config.tracking.videos:
            comm.barrier()  # other ranks have written videos, too
            self.telemetry.show_samples(self.folder.samples / f"step-{step:08d}", step)
        loss = row.get("loss")
        if loss is None:
            return False
        # rank 0 decides: saving takes all ranks, and another node's view of the record may be older
        return bool(comm.broadcast_object(self.run.manager.mark_best(step, loss) and self.config.checkpoint.keep_best))

    def _row(self, step: int) -> dict[str, Any]:
        """Validate and sample. Returns a row for metrics.jsonl, empty where there is no validation. A collective call."""
        if self.validation is None:
            return {}
        started = time.monotonic()
        row: dict[str, Any] = {"kind": "validation", "step": step}
        parts = self.run.parts
        parts.wake()
        with contextlib.ExitStack() as swapped:
            for role, ema in parts.averages.items():
                swapped.enter_context(ema.swap(parts.models[role]))
            values = reduce_terms(self.validation.measure(parts.models), self.validation.divisors())
            if values:
                row |= self.validation.row(values)
            self.validation.sample(parts.models, step)
        row["seconds"] = time.monotonic() - started
        if self.run.place.rank == 0 and "loss" in row:
            log.info(f"step {step}: held-out loss {row['loss']:.4f} on {row.get('samples', '?')} samples")
        return row
