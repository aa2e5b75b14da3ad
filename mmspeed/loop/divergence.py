"""The rule for spikes: a loss or a gradient norm far above the running median of the steps before, or a loss far above the first ones.

Its state is a few numbers of whole steps, which are the same on all ranks, so all ranks decide alike; a checkpoint holds it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from mmspeed.config.divergence import DivergenceConfig

MOST_NAMED = 64  # samples of a spike that are kept for messages


def limit_of(values: Sequence[float], factor: float) -> float:
    """The value above which a step counts as part of a spike: `factor` times the median of `values`.

    Of losses around 0 or below it, the median distance from the median stands for the median where that is greater. Infinite where
    both are 0.
    """
    middle = median(values)
    scale = max(abs(middle), median(abs(value - middle) for value in values))
    return middle + (factor - 1) * scale if scale > 0 else math.inf


class DivergenceWatch:
    """The running values of calm steps, and the spike under way.

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
