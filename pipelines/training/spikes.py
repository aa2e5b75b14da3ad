"""Spikes of a run: the rule of `train.divergence` after each step, and what it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mmspeed.config.divergence import DivergenceConfig
from mmspeed.errors import UserError, first_names
from mmspeed.loop.divergence import DivergenceWatch
from mmspeed.loop.step import StepResult
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Data, LeavesOut, StepData


class RollBackError(Exception):
    """Raised after a step to return to a checkpoint from before the steps from number `first` on. `line` says why."""

    def __init__(self, first: int, line: str) -> None:
        super().__init__(line)
        self.first, self.line = first, line


class SpikeGuard:
    """The rule for spikes in a run, the same on all ranks.

    Raises UserError for an action that the task or its data cannot carry out.
    """

    def __init__(self, rule: DivergenceConfig, task: Task, data: Data) -> None:
        if rule.action == "skip" and len(task.updates()) > 1:
            names = ", ".join(update.name for update in task.updates())
            raise UserError(
                f"train.divergence.action: skip is for one update a step, and the task {task.name} makes {names}: stop or roll_back"
            )
        if rule.action == "roll_back" and not isinstance(data, LeavesOut):
            raise UserError(
                f"train.divergence.action: roll_back needs data that leave samples out, unlike {task.name}'s"
            )
        baselines = {update.baseline for update in task.updates()}
        self.rule, self.watch = rule, DivergenceWatch(rule, baselines.pop() if len(baselines) == 1 else None)

    @property
    def accept(self) -> Callable[[float, float], bool] | None:
        """The judge of an update before it is applied; None where all are."""
        return (lambda loss, norm: not self.watch.above(loss, norm)) if self.rule.action == "skip" else None

    @property
    def calm(self) -> bool:
        """False during a spike, whose state is not worth a checkpoint."""
        return self.watch.first is None

    def take(self, step: int, data: StepData, result: StepResult) -> None:
        """Take the result of step number `step`."""
        sources = (item.source for item in data.items if not item.left_out)
        # what is not finite may be a term that does not train, or a norm that one rank alone sees
        loss = result.loss if result.finite else math.nan
        self.watch.observe(step, loss, result.grad_norm if result.finite else math.nan, sources)
        self.watch.skipped += result.withheld

    def judge(self, step: int, result: StepResult) -> None:
        """Raise UserError or RollBackError where the last steps, up to number `step`, are a spike."""
        if self.watch.reached:
            self.end(step, result)

    def end(self, step: int, result: StepResult) -> None:
        """Raise RollBackError where the rule allows one more, else UserError."""
        watch, rule = self.watch, self.rule
        assert watch.first is not None
        line = f"steps {watch.first} to {step}" if watch.first < step else f"step {step}"
        limits = " and ".join(f"{limit:.4g}" for limit in watch.limits())
        line = f"{line}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}; the limits are {limits} (train.divergence)"
        if rule.action == "roll_back" and watch.roll_backs < rule.roll_backs:
            raise RollBackError(watch.first, line)
        done = {
            "skip": f"{watch.streak} updates in a row were not applied",
            "roll_back": f"there were {watch.roll_backs} roll-backs before",
        }.get(rule.action)
        samples = first_names(watch.samples, count=watch.sample_count)
        raise UserError(
            f"{line}{f'; {done}' if done else ''}. Samples: {samples}. No checkpoint was written since step {watch.first}: lower train.lr, "
            "or look at these samples"
        )


def roll_back_row(first: int, last: int, to: int, samples: Sequence[str]) -> dict[str, object]:
    """The row of metrics.jsonl about a roll-back to the checkpoint of step `to`."""
    return {"kind": "roll_back", "step": first, "last": last, "to": to, "samples": list(samples)}
