"""The callbacks around each step of a run, its bar, and its rows of metrics.jsonl."""

from __future__ import annotations

from typing import Any

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.log import ProgressLine
from mmspeed.loop.callbacks import Averages, BaseCallback, LearningRate, SentBytes, Sparsity, StepCounts, StepOutcome
from mmspeed.loop.means import StepMeans
from mmspeed.loop.pipeline import PipelineRows, PipelineRunner
from mmspeed.loop.signals import Request, StopSignals
from mmspeed.loop.step import StepResult
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.run.telemetry import Telemetry, TelemetryCallback
from mmspeed.pipelines.training.events import Events
from mmspeed.pipelines.training.oom_advice import OomAdvisor
from mmspeed.pipelines.training.run_state import Run
from mmspeed.protocols import StepData


class RunCallbacks:
    """The callbacks of a run, called in one order on all ranks, and its bar. `memory`, `bar` and `times` are contexts of the steps."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        telemetry: Telemetry,
        events: Events,
        requests: StopSignals,
    ) -> None:
        parts, device, train, layout = run.parts, run.place.device, config.train, run.placement.layout
        folder = RunFolder(run.place.folder)
        self.run, self.telemetry, self.requests, self.train = run, telemetry, requests, train
        self.memory = OomAdvisor(config, device, run.place.folder, parts.model, parts.optimizer, parts.ema)
        self.bar = ProgressLine("train", train.steps, "step", start=run.step)
        self.means = StepMeans(comm.all_reduce_sum, train.log_every, several=len(parts.learners) > 1)
        self.times = run.watch.times(parts.models, run.data, device, layout.ledger, run.place.dealt)
        self.request: Request = "none"  # to save or to stop, as of the last step
        sparsity = [one for role in parts.roles for one in Sparsity.of(parts.models[role], comm.all_reduce_sum, role)]
        self.all: list[BaseCallback] = [
            self.times,
            *([] if parts.rests is None else [parts.rests]),
            LearningRate(train, parts.rate_factors),
            *sparsity,
            *(Averages(ema, parts.models[role], role) for role, ema in parts.averages.items()),
            self.memory,
            self.means,
            StepCounts(parts.models, layout.experts.size, run.placement.mesh.staged),
            *run.balances,
            *(
                PipelineRows(each.runner, device, self.due, folder.pipeline if run.place.rank == 0 else None)
                for each in parts.learners
                if isinstance(each.runner, PipelineRunner)
            ),
            *([SentBytes(layout.ledger)] if max(layout.size, layout.experts.size, layout.stages.size) > 1 else []),
            TelemetryCallback(telemetry, run.task, run.data, sparsity),
            events,
        ]

    def due(self, step: int) -> bool:
        """True for a step, from 1, that a row comes after, whatever asks to stop."""
        return step % self.train.log_every == 0 or step == self.train.steps

    def before_step(self, step: int) -> None:
        """Call the callbacks before step number `step`, from 0."""
        for callback in self.all:
            callback.before_step(step)

    def after_step(self, data: StepData, result: StepResult | None) -> None:
        """Call the callbacks after the run's last step, and ask whether the run is to save or to stop. A collective call."""
        step = self.run.step
        self.outcome = StepOutcome(step, self.run.data.locate(step - 1).epoch, data, result)
        for callback in self.all:
            callback.after_step(self.outcome)
        self.request = self.requests.poll()

    def advance(self) -> None:
        """Move the bar, with the mean loss and the mean seconds by name of the last steps behind it."""
        times = " ".join(f"{name} {seconds:.2g} s" for name, seconds in self.telemetry.recent_times().items())
        self.bar.advance(note="" if self.means.recent is None else f"loss {self.means.recent:.4f}  {times}")

    def write_row(self) -> None:
        """Write a row of metrics.jsonl, where there is a step to tell of: the means since the last one, the task's description of the
        step's data, and the callbacks' fields. A collective call.
        """
        outcome = self.outcome
        if outcome.result is None and not self.means.steps:
            return
        row: dict[str, Any] = {
            "kind": "train",
            "step": outcome.step,
            "epoch": outcome.epoch,
            "weight": outcome.data.weight,
            **self.run.task.domain.describe(outcome.data),
            "imbalance": outcome.data.imbalance(),
            **self.run.guard.row(),
        }
        for callback in self.all:
            row |= callback.row()
        self.telemetry.write(row)
