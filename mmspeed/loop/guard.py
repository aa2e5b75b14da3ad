"""The guard of a run: what has happened to each step, and what follows from it.

A sample may be lost or left out, a value not finite; a spike is a loss or a gradient norm far above the running median of the steps before,
or a loss far above the first ones. The guard's state is a few numbers of whole steps, which are the same on all ranks, so all ranks decide
alike; a checkpoint holds it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mmspeed.config.training import DivergenceConfig, TrainConfig
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.protocols import StepData, Update

from .step import StepResult, described, first_met

log = get_logger("train")

MOST_NAMED = 64  # samples of a spike that are kept for messages


def limit_of(values: Sequence[float], factor: float) -> float:
    """The value above which a step counts as part of a spike: `factor` times the median of `values`.

    Of losses around 0 or below it, the median distance from the median stands for the median where that is greater. Infinite where
    both are 0.
    """
    middle = median(values)
    scale = max(abs(middle), median(abs(value - middle) for value in values))
    return middle + (factor - 1) * scale if scale > 0 else math.inf


class Spikes:
    """The rule for spikes: the running values of calm steps, and the spike under way.

    `first`: the first of the `streak` steps above the limit that are the last ones, None without any. `samples`: the sources of some of
    their `sample_count` samples. `skipped`: updates that were not applied; `roll_backs` and `left_out` (uses of samples) only grow.
    """

    def __init__(self, rule: DivergenceConfig, baseline: float | None = None) -> None:
        """`baseline`: the loss of a model that knows nothing; None: not known, and finite losses of the first steps are not judged."""
        self.rule, self.baseline = rule, baseline
        self.losses: deque[float] = deque(maxlen=rule.window)
        self.norms: deque[float] = deque(maxlen=rule.window)
        self.first: int | None = None
        self.streak = self.sample_count = self.skipped = self.roll_backs = self.left_out = 0
        self.samples: list[str] = []
        self._limits: tuple[float, float] | None = None  # of the calm steps so far

    @property
    def watching(self) -> bool:
        """True from the first step on whose values are compared with others."""
        least = self.rule.window if self.baseline is None else 1
        return self.rule.action != "none" and len(self.losses) >= least

    @property
    def reached(self) -> bool:
        """True where the last steps are a spike."""
        return self.streak >= self.rule.steps

    def limits(self) -> tuple[float, float]:
        """The limits of loss and gradient norm; infinite before there are enough calm steps, of norms before the window is full."""
        if not self.watching:
            return math.inf, math.inf
        if self._limits is None:
            if len(self.losses) == self.rule.window:
                self._limits = limit_of(self.losses, self.rule.factor), limit_of(self.norms, self.rule.factor)
            else:  # a lucky first loss is no measure, and norms rise while a rate warms up
                first = median(list(self.losses)[: self.rule.steps])
                self._limits = self.rule.factor * max(first, self.baseline or 0.0), math.inf
        return self._limits

    def above(self, loss: float, norm: float) -> bool:
        """True for values above their limits, and for those that are not finite."""
        if self.rule.action == "none":
            return False
        most_loss, most_norm = self.limits()
        return not (loss <= most_loss and norm <= most_norm and math.isfinite(loss) and math.isfinite(norm))

    def observe(self, step: int, loss: float, norm: float, samples: Iterable[str]) -> None:
        """Take the values of step number `step`, from 1. Values above the limit do not move it."""
        if not self.above(loss, norm):
            if self.rule.action != "none":
                self.losses.append(loss)
                self.norms.append(norm)
                self._limits = None
            self.calm_down()
            return
        self.first = step if self.first is None else self.first
        self.streak += 1
        sources = list(samples)
        self.samples += sources[: MOST_NAMED - len(self.samples)]
        self.sample_count += len(sources)

    def calm_down(self) -> None:
        """Forget the spike under way."""
        self.first, self.streak, self.samples, self.sample_count = None, 0, [], 0

    def sound(self, step: int) -> int | None:
        """The newest step whose checkpoint is known to be from before a spike, after `step` steps; None while nothing is compared.

        The weights of a checkpoint are known to be sound when `steps` calm steps have followed.
        """
        if not self.watching and self.first is None:
            return None
        return (step if self.first is None else self.first - 1) - self.rule.steps

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in JSON's types."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "first": self.first,
            "streak": self.streak,
            "samples": self.samples,
            "sample_count": self.sample_count,
            "skipped": self.skipped,
            "roll_backs": self.roll_backs,
            "left_out": self.left_out,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state; of what only grows, the greater number holds."""
        self.losses = deque(state["losses"], maxlen=self.rule.window)
        self.norms = deque(state["norms"], maxlen=self.rule.window)
        self._limits = None
        self.first, self.streak, self.samples = state["first"], state["streak"], list(state["samples"])
        self.sample_count = state["sample_count"]
        self.skipped = state["skipped"]
        self.roll_backs = max(self.roll_backs, state["roll_backs"])
        self.left_out = max(self.left_out, state["left_out"])


class RollBackError(Exception):
    """Raised after a step to return to a checkpoint from before the steps from number `first` on. `line` says why."""

    def __init__(self, first: int, line: str) -> None:
        super().__init__(line)
        self.first, self.line = first, line


@dataclass(frozen=True)
class Verdict:
    """What follows from a step: rows of metrics.jsonl, and the error that ends the run or sends it back; None: it goes on."""

    rows: Sequence[dict[str, Any]] = ()
    error: UserError | RollBackError | None = None


class Guard:
    """The judge of a run's steps, alike on all ranks; with `leads` it alone says what all of them know. `metrics`: the file of the rows.

    `non_finite`: steps left out because of a value that was not finite. `left_out`: uses of samples without which the rest of a step was
    computed again. Raises UserError for an action that the updates of the task `name` cannot carry out.
    """

    def __init__(self, train: TrainConfig, name: str, updates: Sequence[Update], metrics: Path, leads: bool) -> None:
        rule = train.divergence
        if rule.action == "skip" and len(updates) > 1:
            names = ", ".join(update.name for update in updates)
            raise UserError(
                f"train.divergence.action: skip is for one update a step, and the task {name} makes {names}: stop or roll_back"
            )
        baselines = {update.baseline for update in updates}
        self.spikes = Spikes(rule, baselines.pop() if len(baselines) == 1 else None)
        self.rule, self.allowed, self.metrics, self.leads = rule, train.skip_non_finite, metrics, leads
        self.non_finite = self.left_out = 0

    @property
    def accept(self) -> Callable[[float, float], bool] | None:
        """The judge of an update before it is applied; None where all are."""
        return (lambda loss, norm: not self.spikes.above(loss, norm)) if self.rule.action == "skip" else None

    @property
    def calm(self) -> bool:
        """False during a spike, whose state is not worth a checkpoint."""
        return self.spikes.first is None

    def judge(self, step: int, data: StepData, result: StepResult | None) -> Verdict:
        """What follows from step number `step`, from 1; without a result every sample of it is lost."""
        sources = (item.source for item in data.items if not item.left_out)
        if result is None:
            return self._lost(step, data.left_out, list(sources))
        rows: list[dict[str, Any]] = []
        origin = {} if result.origin is None else {"origin": result.origin}
        if result.left_out:  # so that the others count
            self.left_out += len(result.left_out)
            rows.append({"kind": "left_out", "step": step, "samples": list(result.left_out), **origin})
            self._warn(
                f"step {step}: the loss of {first_names(result.left_out)} is not finite{first_met(result.origin)}; computed again without "
                f"({self.left_out} left out so far)"
            )
        if result.withheld:
            self._warn(
                f"step {step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}; the update is not applied"
            )
        # what is not finite may be a term that does not train, or a norm that one rank alone sees
        loss, norm = (result.loss, result.grad_norm) if result.finite else (math.nan, math.nan)
        self.spikes.observe(step, loss, norm, sources)
        self.spikes.skipped += result.withheld
        error = None
        if not result.finite:
            rows.append({"kind": "non_finite", "step": step, "loss": result.loss, "samples": result.bad, **origin})
            error = self._broken(step, result)
        if error is None and self.spikes.reached:
            error = self._spike(step, result)
        return Verdict(rows, error)

    def row(self) -> dict[str, int]:
        """Fields of the next row of metrics.jsonl: what has been skipped and left out so far."""
        return {
            "skipped_steps": self.non_finite + self.spikes.skipped,
            "left_out_samples": self.left_out + self.spikes.left_out,
            "roll_backs": self.spikes.roll_backs,
        }

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in JSON's types."""
        return {"skipped": self.non_finite, "left_out": self.left_out, "divergence": self.spikes.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.spikes.resume(state["divergence"])
        self.non_finite, self.left_out = int(state["skipped"]), int(state["left_out"])

    def _warn(self, line: str) -> None:
        if self.leads:
            log.warning(line)

    def _lost(self, step: int, left_out: int, sources: Sequence[str]) -> Verdict:
        if left_out and self.leads:
            log.info(f"step {step}: {left_out} samples are left out since a roll-back")
        if not sources:
            return Verdict()
        log.warning(f"step {step} has no sample: {', '.join(sources[:4])} failed (all are listed in {self.metrics})")
        return Verdict([{"kind": "lost", "step": step, "samples": sources}])

    def _broken(self, step: int, result: StepResult) -> UserError | RollBackError | None:
        """Count a step that is not finite; an error when there are more than train.skip_non_finite."""
        self.non_finite += 1
        message = (
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {described(result.bad, result.origin)}"
        )
        effect = "Nothing was updated"
        if result.updated:
            done = ", ".join(sorted(result.updated))
            effect = f"Update '{result.broken}' is not finite and ended the step; of this step {done} was updated"
        if self.non_finite <= self.allowed:
            what = effect if result.updated else "the step is skipped"
            log.warning(f"{message}; {what} ({self.non_finite} of {self.allowed})")
            return None
        if self.rule.action == "roll_back":
            return self._spike(step, result)
        return UserError(
            f"{message}. {effect}. Lower train.lr, look at these samples, or allow skips with train.skip_non_finite."
        )

    def _spike(self, step: int, result: StepResult) -> UserError | RollBackError:
        """The error of a spike up to step number `step`: a roll-back where the rule allows one more."""
        spikes, rule = self.spikes, self.rule
        assert spikes.first is not None
        line = f"steps {spikes.first} to {step}" if spikes.first < step else f"step {step}"
        limits = " and ".join(f"{limit:.4g}" for limit in spikes.limits())
        line = f"{line}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}; the limits are {limits} (train.divergence)"
        if rule.action == "roll_back" and spikes.roll_backs < rule.roll_backs:
            return RollBackError(spikes.first, line)
        done = {
            "skip": f"; {spikes.streak} updates in a row were not applied",
            "roll_back": f"; there were {spikes.roll_backs} roll-backs before",
        }.get(rule.action, "")
        samples = first_names(spikes.samples, count=spikes.sample_count)
        return UserError(
            f"{line}{done}. Samples: {samples}. No checkpoint was written since step {spikes.first}: lower train.lr, "
            "or look at these samples"
        )
