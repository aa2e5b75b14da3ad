"""The rule of which checkpoints of a run are kept when a new one is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT = "before_spike"  # in the entry of a checkpoint that the spike after it makes worth keeping


@dataclass(frozen=True)
class Retention:
    """A rule of what is kept: the newest `last`, the `best` by validation loss, milestones by step and by time, and what is marked `KEPT`.

    `every`: all whose step is a multiple of it. `hours`: the first one of each such period, counted from 1970, so that a restart does
    not move the periods.
    """

    last: int = 2
    best: bool = True
    every: int | None = None
    hours: float | None = None

    def kept(
        self, entries: Sequence[Mapping[str, Any]], times: Mapping[int, float], sound: int | None = None
    ) -> set[int]:
        """The steps to keep of `entries` (`{"step", "loss"}`, with `KEPT` where it is marked, in the order they were written).

        `times`: seconds since 1970 at which the checkpoint of each step was written. `sound`: the newest checkpoint of at most this step
        is kept, too, while the rule for spikes is watching.
        """
        steps: list[int] = [entry["step"] for entry in entries]
        kept = {*steps[-self.last :], *(entry["step"] for entry in entries if KEPT in entry)}
        scored = [entry for entry in entries if entry["loss"] is not None]
        if self.best and scored:
            kept.add(min(scored, key=lambda entry: entry["loss"])["step"])
        if self.every is not None:
            kept |= {step for step in steps if step and step % self.every == 0}
        if self.hours is not None:
            first: dict[int, int] = {}
            for step in sorted(steps, key=lambda step: times[step]):
                first.setdefault(int(times[step] // (3600 * self.hours)), step)
            kept |= set(first.values())
        if sound is not None:
            kept |= set(sorted(step for step in steps if step <= sound)[-1:])
        return kept
