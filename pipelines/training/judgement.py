"""The judgement of each step's outcome: samples that are lost or left out, values that are not finite, spikes and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.loop.step import StepResult
from mmspeed.pipelines.run.run_folder import RunFolder, trim_metrics
from mmspeed.pipelines.run.telemetry import Telemetry
from mmspeed.pipelines.training.run_state import Run
from mmspeed.pipelines.training.spikes import RollBackError, roll_back_row
from mmspeed.protocols import LeavesOut, StepData

if TYPE_CHECKING:
    from mmspeed.pipelines.training.saved_state import SavedStates

log = get_logger("train")


class StepJudge:
    """The judge of a run's steps, alike on all ranks. `saved`: the states that it goes back to after a spike."""

    def __init__(self, config: RunConfig, folder: RunFolder, saved: SavedStates) -> None:
        self.config, self.folder, self.saved = config, folder, saved

    def judge(self, run: Run, data: StepData, result: StepResult | None, telemetry: Telemetry) -> None:
        """Judge the outcome of the step that ended; None: every sample of it is lost.

        Raises UserError or RollBackError where the run cannot go on from here.
        """
        if result is None:
            self._all_lost(run, data, telemetry)
            return
        if result.left_out:
            self._computed_again(run, result, telemetry)
        self._look_at(run, data, result, telemetry)

    def roll_back(self, run: Run, spike: RollBackError) -> dict[str, object]:
        """Return to the newest checkpoint from before a spike, and leave the spike's samples out; returns a row of metrics.jsonl.

        Raises UserError without such a checkpoint.
        """
        last, watch = run.step, run.spikes.watch
        checkpoint = run.manager.newest_until(watch.sound(last) or 0)
        if checkpoint is None:
            raise UserError(
                f"{spike.line}. No checkpoint has {watch.rule.steps} calm steps after it, so there is none to return to: "
                "lower train.lr or checkpoint.every"
            )
        assert isinstance(run.data, LeavesOut)
        samples = run.data.leave_out(range(spike.first - 1, last))
        watch.roll_backs, watch.left_out = watch.roll_backs + 1, watch.left_out + len(samples)
        self.saved.restore(run, checkpoint, None)
        run.manager.remove_after(run.step)
        if run.place.rank == 0:
            trim_metrics(self.folder.metrics, run.step)
            log.warning(
                f"{spike.line}. Going back to step {run.step}, without the samples of these steps: {first_names(samples)} "
                f"(roll-back {watch.roll_backs} of {watch.rule.roll_backs})"
            )
        comm.barrier()
        return roll_back_row(spike.first, last, run.step, samples)

    def _all_lost(self, run: Run, data: StepData, telemetry: Telemetry) -> None:
        sources = [item.source for item in data.items if not item.left_out]
        if data.left_out and run.place.rank == 0:
            log.info(f"step {run.step}: {data.left_out} samples are left out since a roll-back")
        if not sources:
            return
        where = self.folder.root / "metrics.jsonl"
        log.warning(f"step {run.step} has no sample: {', '.join(sources[:4])} failed (all are listed in {where})")
        telemetry.write({"kind": "lost", "step": run.step, "samples": sources})

    def _computed_again(self, run: Run, result: StepResult, telemetry: Telemetry) -> None:
        """Record the samples of a step that were left out, so that the others count."""
        run.left_out += len(result.left_out)
        telemetry.write({"kind": "left_out", "step": run.step, "samples": list(result.left_out)})
        if run.place.rank == 0:
            log.warning(
                f"step {run.step}: the loss of {first_names(result.left_out)} is not finite; computed again without "
                f"({run.left_out} left out so far)"
            )

    def _look_at(self, run: Run, data: StepData, result: StepResult, telemetry: Telemetry) -> None:
        """Judge a step's values. Raises UserError or RollBackError where the run cannot go on from here."""
        if result.withheld and run.place.rank == 0:
            log.warning(
                f"step {run.step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}; the update is not applied"
            )
        run.spikes.take(run.step, data, result)
        run.manager.sound = run.spikes.watch.sound(run.step)
        try:
            if not result.finite:
                self._non_finite(run, result, telemetry)
            run.spikes.judge(run.step, result)
        except (UserError, RollBackError):
            if (before := self._before(run)) is not None:
                run.manager.keep(before)
            raise

    @staticmethod
    def _before(run: Run) -> Path | None:
        """The newest checkpoint that is known to be from before the spike under way, else the one that its first step came after."""
        watch = run.spikes.watch
        sound = run.manager.newest_until(watch.sound(run.step) or 0)
        return run.manager.newest_until(watch.first - 1) if sound is None and watch.first is not None else sound

    def _non_finite(self, run: Run, result: StepResult, telemetry: Telemetry) -> None:
        """Record a step that was left out. Raises UserError, or RollBackError, when there are more than train.skip_non_finite."""
        run.skipped += 1
        samples = first_names(result.bad) or "none alone (the gradient overflowed)"
        message = f"step {run.step}: loss {result.loss}, gradient norm {result.grad_norm}; samples with a non-finite loss: {samples}"
        telemetry.write({"kind": "non_finite", "step": run.step, "loss": result.loss, "samples": result.bad})
        effect = "Nothing was updated"
        if result.updated:
            done = ", ".join(sorted(result.updated))
            effect = f"Update '{result.broken}' is not finite and ended the step; of this step {done} was updated"
        if run.skipped > self.config.train.skip_non_finite:
            if self.config.train.divergence.action == "roll_back":
                run.spikes.end(run.step, result)
            raise UserError(
                f"{message}. {effect}. Lower train.lr, look at these samples, or allow skips with train.skip_non_finite."
            )
        log.warning(
            f"{message}; {'the step is skipped' if not result.updated else effect} ({run.skipped} of {self.config.train.skip_non_finite})"
        )
