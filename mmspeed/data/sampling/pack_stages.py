"""The order of a run whose packs change length, or whose sources change shares, at steps that are planned: a sampler for each stage."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmspeed.data.cache.keys import KEY_LENGTH
from mmspeed.protocols import ShapeClass

from .order import Batching, StepLocation
from .pack_order import PackSample, PackSampler
from .packs import Packs
from .sampler import SampleUse


class StagedPacks:
    """The order of training on packs in stages, with the same methods as `PackSampler`.

    A stage begins where the one before it stops, as a run that goes on with another config does: with the same shares of the sources, the
    tokens that are left of the epoch are packed again; with others, an epoch begins.

    Args:
        stages: each stage's order, and its steps (None: all that remain).
    """

    def __init__(self, stages: Sequence[tuple[PackSampler, int | None]]) -> None:
        self._samplers = [sampler for sampler, _ in stages]
        self.batching: Batching = self._samplers[0].batching  # of all lengths
        self._begins = [0]
        for _, steps in stages[:-1]:
            assert steps is not None
            self._begins.append(self._begins[-1] + steps)
        self._first = 0  # the stage that this order begins in
        self._ready = 0  # the last stage whose beginning is known
        self._lock = threading.Lock()  # steps are read ahead by a thread

    def stage_of(self, step: int) -> int:
        """The number of the stage that a step is in."""
        return max(number for number, begin in enumerate(self._begins) if begin <= step)

    def _sampler(self, step: int) -> PackSampler:
        """The order of the stage that a step is in. Raises IndexError for a step before the origin."""
        number = self.stage_of(step)
        if number < self._first:
            raise IndexError(f"there is no step {step}: the order begins in a later stage")
        with self._lock:
            while self._ready < number:
                before, behind = self._samplers[self._ready], self._samplers[self._ready + 1]
                behind.resume(before.state(self._begins[self._ready + 1]))
                self._ready += 1
        return self._samplers[number]

    def draws(self, step: int) -> list[SampleUse[PackSample]]:
        """The packs of one optimizer step over all devices; left out ones are marked."""
        return self._sampler(step).draws(step)

    def locate(self, step: int) -> StepLocation:
        """The position of an optimizer step. Raises IndexError for one before the origin."""
        location = self._sampler(step).locate(step)
        return StepLocation(self.stage_of(step), location.epoch, location.at)

    def packs_of(self, step: int) -> Packs:
        """The packs of the epoch, or of its rest, that a step is in."""
        return self._sampler(step).packs_of(step)

    def leave_out(self, steps: range) -> list[SampleUse[PackSample]]:
        """Leave the packs of these steps out; returns those that counted until now. Later stages are packed without them."""
        gone: list[SampleUse[PackSample]] = []
        for step in steps:
            sampler = self._sampler(step)
            gone += sampler.leave_out(range(step, step + 1))
            self._ready = self.stage_of(step)
        return gone

    @property
    def without_targets(self) -> int:
        """Packs of the epoch that the order begins in that are left out since they have no target."""
        return self._samplers[self._first].without_targets

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the epoch that the order begins in, if its stage were the last."""
        return self._samplers[self._first].steps_per_epoch

    @property
    def first_pass(self) -> int:
        """The step by which the first epoch has ended, if its stage were the last."""
        return self._samplers[self._first].first_pass

    def samples_of(self, stage: int) -> int:
        """Packs of the epoch that the order begins in."""
        return self._samplers[self._first].samples_of(stage)

    def mean_of_epoch(self, step: int, size: Callable[[ShapeClass], float]) -> float:
        """The mean over the steps of `step`'s epoch, as planned at its beginning, of the sizes of their packs."""
        return self._sampler(step).mean_of_epoch(step, size)

    @property
    def fingerprint(self) -> str:
        """A digest of the documents and of their uses in an epoch of each stage."""
        return hashlib.sha256(" ".join(sampler.fingerprint for sampler in self._samplers).encode()).hexdigest()[
            :KEY_LENGTH
        ]

    def state(self, step: int) -> dict[str, Any]:
        """The state for a checkpoint taken before `step`, in JSON's types, independent of the number of ranks."""
        at = step - 1 if step in self._begins[1:] else step  # behind the last step of a stage: that stage's own state
        return self._sampler(at).state(step)

    def resume(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a checkpoint's state, as `PackSampler.resume`, in the stage that its step is in. Returns a message, or None."""
        self._first = self._ready = self.stage_of(int(state["step"]))
        return self._samplers[self._first].resume(state)
