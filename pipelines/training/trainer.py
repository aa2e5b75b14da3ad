"""`TrainPipeline`: the order of a run of training, for every task.

`run` is the set-up (`opening.py`), `_train` the loop; `callbacks.py` lists the callbacks around each step, and one step is
`mmspeed.loop.step.train_step`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from mmspeed.config import RunConfig, obey_launcher
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.errors import UserError
from mmspeed.log import Working
from mmspeed.loop.guard import Guard, RollBackError
from mmspeed.loop.signals import StopSignals
from mmspeed.loop.step import StepResult, train_step
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.run.telemetry import Telemetry
from mmspeed.pipelines.tasks import Task, as_task, make_task, maker_of
from mmspeed.pipelines.training import opening
from mmspeed.pipelines.training.callbacks import RunCallbacks
from mmspeed.pipelines.training.events import Events, TrainCallback
from mmspeed.pipelines.training.run_state import Run, TrainResult
from mmspeed.pipelines.training.validation import Validator
from mmspeed.protocols import Domain, StepData


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

    def run(self) -> TrainResult:
        """Train to the end, or until a signal, a callback or a file stops the run."""
        with opening.started(self.config, self.folder, self.online) as (device, watch):
            began, config = time.monotonic(), self.config
            # 1. devices, data, models, and activation policies
            placement = opening.agree_on_place(config, self.folder, device)
            manager = self.saved.manager()
            with Working("looking for a checkpoint", tell=False):
                newest = self.saved.find(manager)
            where = replace(placement.at(device, self.folder.root), resumed=not newest.fresh)
            opening.tell(where, opening.device_line(config, where))
            opening.tell(where, f"run folder: {self.folder.root}")
            data = opening.open_data(config, self.task, where)
            parts = opening.build_models(config, self.task, placement, where)
            # 2. the state of a run that was stopped
            guard = Guard(config.train, self.task.name, self.task.updates(), self.folder.metrics, where.rank == 0)
            run = Run(self.task, placement, where, data, parts, manager, guard, watch)
            manager.on_written = self.events.saved
            with Working("reading the checkpoint", tell=False):
                self.saved.resume(run, newest)  # now all weights have values
            if run.step >= config.train.steps:
                manager.wait()
                return TrainResult(self.folder.root, run.step, True, True, None, 0.0)
            self.task.prepare(parts.models, where)
            watch.begin(run.step)
            # 3. the steps
            peak = opening.peak_of(config, device)
            run.balances = opening.balances_of(config, run, peak[0])
            try:
                stopped, loss, asked = self._train_on(run, peak)
            finally:
                data.close()
            return TrainResult(self.folder.root, run.step, not stopped, False, loss, time.monotonic() - began, asked)

    def _train_on(self, run: Run, peak: tuple[float, str]) -> tuple[bool, float | None, bool]:
        """Train to the end, from an earlier checkpoint again after a spike. Returns as `_train`, and whether a signal or file asked to stop."""
        row: dict[str, object] = {}  # about a roll-back
        grace = self.config.checkpoint.grace_seconds
        with StopSignals(self.folder.root, grace, lambda: run.manager.saved_step) as requests:
            while True:
                with Telemetry(self.config, run.place, peak, run.step) as telemetry:
                    if row:
                        telemetry.write(row)
                    try:
                        stopped, loss = self._train(run, telemetry, requests)
                        self.events.ended(not stopped, loss)
                        return stopped, loss, requests.asked
                    except RollBackError as error:
                        spike = error
                    except Exception as error:
                        if isinstance(error, UserError) or self.events.failed:
                            run.manager.wait()  # all ranks are here: let the checkpoint under way complete
                        raise
                run.watch.enter_part("checkpoint", run.step)
                row = self.saved.roll_back(run, spike)

    def _train(self, run: Run, telemetry: Telemetry, requests: StopSignals) -> tuple[bool, float | None]:
        """Train from `run.step` to the end. Returns (stopped early, last loss)."""
        steps = self.config.train.steps
        validator = Validator(self.config, run, telemetry, self.events)
        loss, stopped, owed = None, False, False
        with ExitStack() as stack:
            telemetry.resume_clock()
            self.events.begin(run.step, run.place, run.parts.models, requests.stop)
            callbacks = RunCallbacks(self.config, run, telemetry, self.events, requests)
            for context in (callbacks.memory, callbacks.bar, callbacks.times):
                stack.enter_context(context)
            run.watch.waiting(run.step + 1, run.data.locate(run.step).epoch)
            for data in stack.enter_context(closing(run.data.steps(run.step, steps))):
                # 1. one optimizer step
                run.watch.step(run.step + 1, data)
                callbacks.before_step(run.step)
                result = self._step(run, data)
                run.step += 1
                callbacks.after_step(data, result)
                # 2. an update that is not finite changed nothing and ended its step; too many of them end the run
                if result is not None and result.finite:
                    loss = result.loss
                self._judge(run, data, result, telemetry)
                # 3. progress and metrics; the sums of a row end with the process
                callbacks.advance()
                last, wish = run.step == steps, callbacks.request
                if callbacks.due(run.step) or wish == "stop":
                    callbacks.write_row()
                # 4. checkpoint, perhaps requested by a signal, then validation, whose errors so cost no step
                owed = self._save(run, callbacks, validator, owed)
                run.manager.poll()
                telemetry.resume_clock()
                if wish == "stop" and not last:
                    stopped = True
                    break
                if not last:
                    run.watch.waiting(run.step + 1, run.data.locate(run.step).epoch)
        self._end(run, telemetry, stopped)
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
                again=partial(run.data.again, run.step),
                accept=run.guard.accept,
            )
        except UserError as error:
            raise UserError(f"step {run.step + 1}: {error}") from error

    def _judge(self, run: Run, data: StepData, result: StepResult | None, telemetry: Telemetry) -> None:
        """Raise UserError or RollBackError where the run cannot go on from the step that ended."""
        verdict = run.guard.judge(run.step, data, result)
        for row in verdict.rows:
            telemetry.write(row)
        if result is not None:
            run.manager.sound = run.guard.spikes.sound(run.step)
        if verdict.error is not None:
            self.saved.keep_sound(run)
            raise verdict.error

    def _save(self, run: Run, callbacks: RunCallbacks, validator: Validator, owed: bool) -> bool:
        """Save where a checkpoint is due, requested, or `owed` by a step before, and validate. True where it waits for the end of a spike."""
        config, wish, last = self.config, callbacks.request, run.step == self.config.train.steps
        due = last or wish != "none" or owed or run.step % config.checkpoint.every == 0
        owed = due and not (last or wish != "none" or run.guard.calm)
        if due and not owed:
            run.watch.enter_part("checkpoint", run.step)
            with Working(f"step {run.step}: saving", tell=False):
                self.saved.save(run, callbacks.telemetry, blocking=last or wish == "stop")
            if last or wish == "stop":
                callbacks.requests.answered()
        if last or run.step % config.validate_.every == 0:
            run.watch.enter_part("validation", run.step)
            with callbacks.memory.around_validation(), Working(f"step {run.step}: validating", tell=False):
                best = validator.validate(run.step)
            if best and not due and run.guard.calm:
                self.saved.save(run, callbacks.telemetry, blocking=False)
        return owed

    @staticmethod
    def _end(run: Run, telemetry: Telemetry, stopped: bool) -> None:
        """Write what the data say of their end, and wait for the last checkpoint."""
        summary = run.data.summary()
        if summary is not None:
            telemetry.write({**summary, "step": run.step})
        run.watch.enter_part("checkpoint", run.step)
        run.manager.wait()
        if not stopped and run.manager.local is not None:
            run.manager.local.remove_all()
        run.watch.ended()
