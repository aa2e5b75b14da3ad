"""How a run of training ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspeed.log import format_seconds


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    run: Path
    step: int
    finished: bool  # False when it was stopped by a signal or a `stop` file
    already: bool  # the run had been finished before
    loss: float | None
    seconds: float

    def lines(self) -> list[str]:
        """The summary that people read."""
        if self.already:
            return [
                f"{self.run} is finished: {self.step} steps are trained.",
                "Raise train.steps to train on, or choose another name for a new run.",
            ]
        state = "finished" if self.finished else "stopped and saved; the same command goes on"
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        return [f"{self.run}: {state} at step {self.step}{loss}, {format_seconds(self.seconds)}"]
