"""`TrainPipeline`: the order of a run of training, for every task.

`_run` is the set-up, `_train` the loop, `_callbacks` lists the callbacks around each step; one step is
`mmspeed.loop.step.train_step`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import RunConfig, obey_launcher
from mmspeed.config.leaves import flat
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, Working, format_seconds, get_logger
from mmspeed.loop.callbacks import Averages, Callback, LearningRate, Signals, Sparsity, StepCounts, StepOutcome
from mmspeed.loop.means import StepMeans
from mmspeed.loop.signals import StopSignals
from mmspeed.loop.step import StepResult, train_step
from mmspeed.loop.watch.phases import longest_wait
from mmspeed.loop.watch.rank_times import RankTimes
from mmspeed.mesh import process_group
from mmspeed.pipelines.report.run_page import write_report
from mmspeed.pipelines.run.agreement import WeightsAgreement, require_agreement, run_facts
from mmspeed.pipelines.run.assembly import assemble, base_files, place
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.run.telemetry import Telemetry, TelemetryCallback
from mmspeed.pipelines.tasks import Task, as_task, make_task, maker_of
from mmspeed.pipelines.training import opening
from mmspeed.pipelines.training.events import Events, TrainCallback
from mmspeed.pipelines.training.judgement import StepJudge
from mmspeed.pipelines.training.oom_advice import OomAdvisor
from mmspeed.pipelines.training.run_state import Run
from mmspeed.pipelines.training.spikes import RollBackError, SpikeGuard
from mmspeed.pipelines.training.validation import Validator
from mmspeed.pipelines.training.watch import RunWatch
from mmspeed.pipelines.tuning.memory_search import policies_under_budget
from mmspeed.protocols import Domain, ReadsAgain, RunPlace, StepData
from mmspeed.rendezvous import restarts

log = get_logger("train")

LOCK_PATIENCE = (
    60.0  # seconds that a restarted run waits for the folder, which a rank of the last attempt may still hold
)


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run."""

    run: Path
    step: int
    finished: bool  # False when it was stopped by a signal, a callback or a `stop` file
    already: bool  # the run had been finished before
    loss: float | None
    seconds: float
    asked: bool = False  # to stop, perhaps in its last step

    def lines(self) -> list[str]:
        """The summary for the user."""
        if self.already:
            return [
                f"{self.run} is finished: {self.step} steps are trained.",
                "Raise train.steps to train on, or choose another name for a new run.",
            ]
        state = "finished" if self.finished else "stopped and saved; the same command goes on"
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        return [f"{self.run}: {state} at step {self.step}{loss}, {format_seconds(self.seconds)}"]


class TrainPipeline:
    """The pipeline that trains a config's model, or resumes a run that was stopped.

    `task`: the domain to train, by the config's method, or a `Task` of both; None: what the config names. With `online`, as in `mmspeed train`, or with a `maker` of your own
    (as `mmspeed.preprocess.OnlineBuilder`), a cache that is missing or incomplete is completed during the first epoch; without, it is an
    error. `callbacks` (`mmspeed.pipelines.TrainCallback`) are called after steps, validations and checkpoints and at the end, on all ranks.

    `run()` raises UserError for a cache that cannot be used, a run of that name with another model, a non-finite loss, a full disk, and
    whatever a callback raises. Settings of `accelerate launch` are obeyed or refused (`obey_launcher`). Raises ValueError for `online`
    with a `task`, whose maker is its own.
    """

    def __init__(
        self,
        config: RunConfig,
        maker: OnlineEncoder | None = None,
        task: Domain | Task | None = None,
        *,
        online: bool = False,
        callbacks: Sequence[TrainCallback] = (),
    ) -> None:
        self.config = obey_launcher(config)
        if online and task is not None:
            raise ValueError("online completes the data of the config's task: give a `task` its maker instead")
        if task is not None and self.config is not config:  # the task has read the other one
            raise UserError(
                "make the task, too, from `mmspeed.config.obey_launcher(config)`, as accelerate launch changes the config"
            )
        # here: torch's checkpoints take a second to load
        from mmspeed.pipelines.training.saved_state import SavedStates

        config = self.config
        maker = maker or (maker_of(config) if online else None)
        self.task = make_task(config, maker) if task is None else as_task(task, config)
        self.online = online or maker is not None
        self.events = Events(callbacks)
        self.folder = RunFolder(config.run_dir)
        self.saved = SavedStates(config, self.folder)
        self.judge = StepJudge(config, self.folder, self.saved)

    def run(self) -> TrainResult:
        """Train to the end, or until a signal, a callback or a file stops the run."""
        device = pick(self.config.device.kind)
        device.activate()
        patience = LOCK_PATIENCE if restarts() else 0.0
        with ExitStack() as stack:
            stack.enter_context(process_group(device, longest_wait(self.config.train.watchdog)))
            watch = stack.enter_context(
                RunWatch(self.config, self.folder, dist.get_rank(), dist.get_world_size(), self.online)
            )
            if dist.get_rank() == 0:
                stack.enter_context(self.folder.locked(patience))
            return self._run(device, watch)

    def _run(self, device: Device, watch: RunWatch) -> TrainResult:
        started, config = time.monotonic(), self.config
        # 1. devices, data, models, and activation policies
        require_agreement(run_facts(config, device), "start all of them with the same config and the same software")
        placement = place(config, device)
        # rank 0 looks: another node's view of the folder may be older
        comm.first_does(self.folder.check_generator, dist.get_rank())
        manager = self.saved.manager()
        with Working("looking for a checkpoint", tell=False):
            newest = self.saved.find(manager)
        where = replace(placement.at(device, self.folder.root), resumed=not newest.fresh)
        self._tell(where, opening.device_line(config, device, where.world, where.strategy))
        self._tell(where, f"run folder: {self.folder.root}")
        with Working("opening the data", tell=False):
            self.task.domain.open(where)
            self._tell_notes(where)
            data = self.task.data(where)
        require_agreement(flat({"data": data.fingerprint, **self.task.domain.info()}), "give all of them the same data")
        self._tell(where, opening.data_line(data, config.train.steps))
        choice = policies_under_budget(config, self.task, where)
        with Working("building the model", tell=False):
            weights, bare = WeightsAgreement(), self.task.build()
            weights.require_same_built(bare)
            require_agreement(flat({"base": base_files(bare)}), "give all of them the same files of weights")
            resumed = not newest.fresh
            parts = assemble(config, self.task, bare, placement, device, choice, weights.add_drawn, resumed=resumed)
            weights.require_same_drawn(parts.models)
            self._tell(where, opening.model_line(config, parts.models))
            self._tell(where, parts.compiling.line)
            self._tell(where, opening.optimizer_line(config, {role: parts.models[role] for role in parts.roles}))
        # 2. the state of a run that was stopped
        spikes = SpikeGuard(config.train.divergence, self.task, data)
        run = Run(self.task, placement, where, data, parts, manager, spikes)
        manager.on_written = self.events.saved
        with Working("reading the checkpoint", tell=False):
            self.saved.resume(run, newest)  # now all weights have values
        if run.step >= config.train.steps:
            manager.wait()
            return TrainResult(self.folder.root, run.step, True, True, None, 0.0)
        self.task.prepare(parts.models, where)
        watch.begin(run.step)
        # 3. the steps
        with Working("measuring the device's peak", tell=False):
            peak = self._peak(device)
        try:
            stopped, loss, asked = self._train_on(run, device, watch, peak)
        finally:
            data.close()
        return TrainResult(self.folder.root, run.step, not stopped, False, loss, time.monotonic() - started, asked)

    def _train_on(
        self, run: Run, device: Device, watch: RunWatch, peak: tuple[float, str]
    ) -> tuple[bool, float | None, bool]:
        """Train to the end, from an earlier checkpoint again after a spike. Returns as `_train`, and whether a signal or file asked to stop."""
        place = run.place
        row: dict[str, object] = {}  # about a roll-back
        grace = self.config.checkpoint.grace_seconds
        with StopSignals(self.folder.root, grace, lambda: run.manager.saved_step) as requests:
            while True:
                with Telemetry(
                    self.config, self.folder.root, device, place.world, place.rank == 0, peak, run.step
                ) as telemetry:
                    if row:
                        telemetry.write(row)
                    try:
                        stopped, loss = self._train(run, telemetry, watch, requests)
                        self.events.ended(not stopped, loss)
                        return stopped, loss, requests.asked
                    except RollBackError as error:
                        spike = error
                    except Exception as error:
                        if isinstance(error, UserError) or self.events.failed:
                            run.manager.wait()  # all ranks are here: let the checkpoint under way complete
                        raise
                watch.enter("checkpoint", run.step)
                row = self.judge.roll_back(run, spike)

    # -- set-up ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _tell(where: RunPlace, line: str | None) -> None:
        if where.rank == 0 and line is not None:
            log.info(line)

    def _tell_notes(self, where: RunPlace) -> None:
        lines, warnings = self.task.domain.notes() if where.rank == 0 else ([], [])
        for line in lines:
            log.info(line)
        for warning in warnings:
            log.warning(warning)

    def _callbacks(
        self,
        run: Run,
        telemetry: Telemetry,
        memory: OomAdvisor,
        means: StepMeans,
        signals: Signals,
        times: RankTimes,
    ) -> list[Callback]:
        """The callbacks around each step, in this order on all ranks."""
        parts, config = run.parts, self.config
        sparsity = [one for role in parts.roles for one in Sparsity.of(parts.models[role], comm.all_reduce_sum, role)]
        averages = [Averages(ema, parts.models[role], role) for role, ema in parts.averages.items()]
        return [
            times,
            *([] if parts.rests is None else [parts.rests]),
            LearningRate(config.train, parts.rate_factors),
            *sparsity,
            *averages,
            memory,
            means,
            StepCounts(parts.models),
            TelemetryCallback(telemetry, run.task, run.data, sparsity),
            self.events,
            signals,
        ]

    # -- the loop -------------------------------------------------------------------------------------------------

    def _train(
        self, run: Run, telemetry: Telemetry, watch: RunWatch, requests: StopSignals
    ) -> tuple[bool, float | None]:
        """Train from `run.step` to the end. Returns (stopped early, last loss)."""
        config, train, parts = self.config, self.config.train, run.parts
        with Working("preparing validation", tell=False):
            validator = Validator(run.task, parts, run.data, run.place)
        loss, stopped, owed = None, False, False
        with ExitStack() as stack:
            batches = run.data.steps(run.step, train.steps)
            telemetry.resume_clock()
            self.events.begin(run.step, self.folder.root, parts.models, run.place.rank, run.place.world, requests.stop)
            memory = stack.enter_context(
                OomAdvisor(config, run.place.device, self.folder.root, parts.model, parts.optimizer, parts.ema)
            )
            signals = Signals(requests)
            line = stack.enter_context(ProgressLine("train", train.steps, "step", start=run.step))
            means = StepMeans(comm.all_reduce_sum, train.log_every, several=len(parts.learners) > 1)
            times = stack.enter_context(watch.times(parts.models, run.data, run.place.device))
            callbacks = self._callbacks(run, telemetry, memory, means, signals, times)
            watch.waiting(run.step + 1, run.data.locate(run.step).epoch)
            for data in stack.enter_context(closing(batches)):
                # 1. one optimizer step
                watch.step(run.step + 1, data)
                for callback in callbacks:
                    callback.before_step(run.step)
                result = self._step(run, data)
                outcome = StepOutcome(run.step + 1, run.data.locate(run.step).epoch, data, result)
                run.step += 1
                for callback in callbacks:
                    callback.after_step(outcome)
                # 2. an update that is not finite changed nothing and ended its step; too many of them end the run
                if result is not None and result.finite:
                    loss = result.loss
                self.judge.judge(run, data, result, telemetry)
                # 3. progress and metrics
                line.advance(note=_note(means, telemetry))
                last, wish = run.step == train.steps, signals.request
                if last or wish == "stop" or run.step % train.log_every == 0:  # the sums of a row end with the process
                    self._write_row(run, outcome, means, callbacks, telemetry)
                # 4. checkpoint, perhaps requested by a signal, then validation, whose errors so cost no step
                due = last or wish != "none" or owed or run.step % config.checkpoint.every == 0
                owed = due and not (last or wish != "none" or run.spikes.calm)  # it waits for the end of a spike
                if due and not owed:
                    watch.enter("checkpoint", run.step)
                    with Working(f"step {run.step}: saving", tell=False):
                        self.saved.save(run, telemetry, blocking=last or wish == "stop")
                    if last or wish == "stop":
                        requests.answered()
                if last or run.step % config.validate_.every == 0:
                    watch.enter("validation", run.step)
                    with memory.around_validation(), Working(f"step {run.step}: validating", tell=False):
                        best = self._validate(run, validator, telemetry)
                    if best and not due and run.spikes.calm:
                        self.saved.save(run, telemetry, blocking=False)
                run.manager.poll()
                telemetry.resume_clock()
                if wish == "stop" and not last:
                    stopped = True
                    break
                if not last:
                    watch.waiting(run.step + 1, run.data.locate(run.step).epoch)
        summary = run.data.summary()
        if summary is not None:
            telemetry.write({**summary, "step": run.step})
        watch.enter("checkpoint", run.step)
        run.manager.wait()
        if not stopped and run.manager.local is not None:
            run.manager.local.remove_all()
        watch.ended()
        return stopped, loss

    def _step(self, run: Run, data: StepData) -> StepResult | None:
        """The updates of one step; None when every item of it is lost."""
        if not data.counts:
            return None
        try:
            return train_step(
                run.parts.models,
                run.parts.learners,
                data.batches,
                data.divisors,
                clip_norm=self.config.train.clip_norm,
                tensor=run.placement.layout.tensor,
                mesh=run.placement.mesh,
                step=run.step,
                weight=data.weight,
                again=partial(run.data.again, run.step) if isinstance(run.data, ReadsAgain) else None,
                accept=run.spikes.accept,
            )
        except UserError as error:
            raise UserError(f"step {run.step + 1}: {error}") from error

    def _write_row(
        self, run: Run, outcome: StepOutcome, means: StepMeans, callbacks: list[Callback], telemetry: Telemetry
    ) -> None:
        """Write a row of metrics.jsonl, where there is a step to tell of: the means since the last one, the task's description of the
        step's data, and the callbacks' fields. A collective call.
        """
        if outcome.result is None and not means.steps:
            return
        row: dict[str, Any] = {
            "kind": "train",
            "step": outcome.step,
            "epoch": outcome.epoch,
            "weight": outcome.data.weight,
            **run.task.domain.describe(outcome.data),
            "imbalance": outcome.data.imbalance(),
            "skipped_steps": run.skipped + run.spikes.watch.skipped,
            "left_out_samples": run.left_out + run.spikes.watch.left_out,
            "roll_backs": run.spikes.watch.roll_backs,
        }
        for callback in callbacks:
            row |= callback.row()
        telemetry.write(row)

    def _validate(self, run: Run, validator: Validator, telemetry: Telemetry) -> bool:
        """Validate and sample. True where the held-out loss is the lowest so far, so that this step is worth a checkpoint."""
        row: Mapping[str, Any] = validator.validate(run.step)
        if row:
            telemetry.write(dict(row))
            self.events.validated(row)
            if run.place.rank == 0 and self.config.validate_.report:
                write_report(self.folder.root)
        if self.config.trackers and self.config.tracking.videos:
            comm.barrier()  # other ranks have written videos, too
            telemetry.show_samples(self.folder.samples / f"step-{run.step:08d}", run.step)
        loss = row.get("loss")
        if loss is None:
            return False
        # rank 0 decides: saving takes all ranks, and another node's view of the record may be older
        return bool(comm.broadcast_object(run.manager.mark_best(run.step, loss) and self.config.checkpoint.keep_best))

    def _peak(self, device: Device) -> tuple[float, str]:
        """(peak FLOP/s of one device, where the figure is from), the same on all ranks."""
        if self.config.device.peak_tflops is not None:
            return self.config.device.peak_tflops * 1e12, "device.peak_tflops in the config"
        dtype = parse_dtype(self.config.device.dtype)
        flops, source = comm.broadcast_object(list(device.peak_flops(dtype)) if dist.get_rank() == 0 else None)
        return flops, source


def _note(means: StepMeans, telemetry: Telemetry) -> str:
    """The text behind the bar: the mean loss and the mean seconds by name of the last steps."""
    if means.recent is None:
        return ""
    times = " ".join(f"{name} {seconds:.2g} s" for name, seconds in telemetry.recent_times().items())
    return f"loss {means.recent:.4f}  {times}"
