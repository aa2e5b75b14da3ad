"""Metrics of a run while it trains: `metrics.jsonl` always, trackers through accelerate where they are configured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspeed.config import RunConfig
from mmspeed.log import MetricsLog
from mmspeed.loop.callbacks import BaseCallback, Sparsity, StepOutcome
from mmspeed.pipelines.run.trackers import Trackers, sampled_videos
from mmspeed.pipelines.tasks import Task
from mmspeed.plan.throughput import ThroughputMeter
from mmspeed.protocols import Data, RunPlace


class Telemetry:
    """A context manager that writes the rows of a run's metrics on rank 0; other ranks only keep time.

    `step`: the step that training goes on from.

    Time spent on validation and checkpoints does not count as training time: call `resume_clock` after them.
    """

    def __init__(self, config: RunConfig, place: RunPlace, peak: tuple[float, str], step: int = 0) -> None:
        self.device = place.device
        self.peak_flops, self.peak_source = peak
        self._meter = ThroughputMeter(self.peak_flops, place.world)
        self._metrics = MetricsLog(place.folder / "metrics.jsonl") if place.rank == 0 else None
        self.trackers = Trackers(config, place.folder, step) if place.rank == 0 else None
        self._waited = self._trained = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=config.train.log_every)  # (data, all) of a step
        self._since: list[tuple[float, float]] = []  # the last row
        self.resume_clock()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.trackers is not None:
            self.trackers.finish()
        if self._metrics is not None:
            self._metrics.close()

    def resume_clock(self) -> None:
        """Start the time of the next step now."""
        self._mark = time.perf_counter()

    def count_step(self, samples: int, tokens: int, forward_flops: float, waited_seconds: float) -> None:
        """Count a step: `samples`, `tokens`, `forward_flops` of all devices; `waited_seconds` for data since the start."""
        now = time.perf_counter()
        seconds = waited_seconds - self._waited, now - self._mark
        self._recent.append(seconds)
        self._since.append(seconds)
        self._meter.add(
            samples=samples, tokens=tokens, forward_flops=forward_flops, data_wait_s=seconds[0], wall_s=seconds[1]
        )
        self._trained += seconds[1]
        self._waited, self._mark = waited_seconds, now

    def recent_times(self) -> dict[str, float]:
        """The mean seconds of the last `train.log_every` steps, by name."""
        return _named_times(self._recent)

    def rates(self, saved_flops: float = 0.0) -> dict[str, Any]:
        """Throughput since the last row, and memory now. `saved_flops`: counted operations that sparse attention left out."""
        rates = self._meter.read(saved_flops)
        times, self._since = _named_times(self._since), []
        return {
            "step_seconds": times,
            "samples_per_s": rates.samples_per_s,
            "tokens_per_s": rates.tokens_per_s,
            "data_wait": rates.data_wait,
            "mfu": rates.mfu,
            "effective_mfu": rates.effective_mfu,
            "peak_tflops": self.peak_flops / 1e12,
            "peak_source": self.peak_source,
            "memory_bytes": self.device.memory_bytes(),
            "peak_memory_bytes": self.device.peak_memory_bytes(),
            "elapsed_seconds": self._trained,
        }

    def write(self, row: dict[str, Any]) -> None:
        """Write a row with `kind` and `step`; trackers get its numbers as `kind/name`."""
        if self._metrics is not None:
            self._metrics.write(**row)
        if self.trackers:
            self.trackers.log(row)

    def show_samples(self, folder: Path, step: int) -> None:
        """Give the videos that were sampled into a folder to the trackers, where there is any."""
        if self.trackers:
            self.trackers.log_videos(sampled_videos(folder), step)


def _named_times(steps: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The mean seconds of steps: waiting for data, and computing, exchanges between devices included."""
    count = max(1, len(steps))
    waited, whole = (sum(column) / count for column in zip(*steps, strict=True)) if steps else (0.0, 0.0)
    return {"data": waited, "compute": max(0.0, whole - waited)}


class TelemetryCallback(BaseCallback):
    """A callback that counts the usage of each step and reports throughput since the last row."""

    def __init__(self, telemetry: Telemetry, task: Task, data: Data, sparsity: Sequence[Sparsity]) -> None:
        self.telemetry, self.task, self.data, self.sparsity = telemetry, task, data, sparsity

    def after_step(self, outcome: StepOutcome) -> None:
        usage = self.task.domain.usage(outcome.data)
        self.telemetry.count_step(
            samples=usage.items,
            tokens=usage.tokens,
            forward_flops=usage.third,
            waited_seconds=self.data.waited_seconds,
        )

    def row(self) -> dict[str, Any]:
        return self.telemetry.rates(saved_flops=sum(one.saved_flops() for one in self.sparsity))
