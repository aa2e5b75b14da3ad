"""The state of a run between two steps, with all that its parts share, and its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmspeed.log import format_seconds
from mmspeed.loop.expert_balance import ExpertBalance
from mmspeed.loop.guard import Guard
from mmspeed.loop.watch.run_watch import RunWatch
from mmspeed.pipelines.run.assembly import Assembly, Placement
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Data, RunPlace

if TYPE_CHECKING:
    from mmspeed.loop.checkpoint.manager import CheckpointManager


@dataclass
class Run:
    """A run that is ready for its first step."""

    task: Task
    placement: Placement
    place: RunPlace
    data: Data
    parts: Assembly
    manager: CheckpointManager
    guard: Guard
    watch: RunWatch
    step: int = 0  # of the next step
    balances: Sequence[ExpertBalance] = ()  # of the roles with experts over devices

    @contextmanager
    def experts_at_home(self) -> Iterator[None]:
        """Have the experts of all roles in their order inside, as files know them."""
        with ExitStack() as stack:
            for balance in self.balances:
                stack.enter_context(balance.at_home())
            yield


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
