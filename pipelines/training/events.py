"""Events of a run of training, for callbacks of users: `TrainPipeline(config, callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from mmspeed import comm
from mmspeed.errors import UserError
from mmspeed.loop.callbacks import BaseCallback, StepOutcome
from mmspeed.protocols import RunPlace


@dataclass(frozen=True)
class RunEvent:
    """An event of a run: the steps done, the run's folder, the models by role, and this process.

    `stop()`, on one rank or all, ends training as SIGTERM does: after this step if it is called in `on_step`, else after the next.
    """

    step: int
    folder: Path
    models: Mapping[str, nn.Module]
    rank: int
    world: int
    stop: Callable[[], None] = field(repr=False)


@dataclass(frozen=True)
class StepEvent(RunEvent):
    """The end of a step. `outcome.result` is None where every sample of it is lost; its loss is that of all ranks."""

    outcome: StepOutcome

    @property
    def loss(self) -> float | None:
        """The step's loss, of all ranks."""
        return None if self.outcome.result is None else self.outcome.result.loss


@dataclass(frozen=True)
class ValidationEvent(RunEvent):
    """The end of a validation. `row`: that of metrics.jsonl."""

    row: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointEvent(RunEvent):
    """A checkpoint is whole on disk, in the folder `path`; `step` is its step, which others may have followed."""

    path: Path


@dataclass(frozen=True)
class EndEvent(RunEvent):
    """The end of training: `finished`, or stopped by a signal, a file or a callback. There is none after an error."""

    finished: bool
    loss: float | None


class TrainCallback:
    """Base class of users' callbacks: methods that do nothing. Each is called on all ranks, in the order of the list.

    An exception in one ends the run: on its own rank as it is, on the others as a UserError that names the rank.
    """

    def on_step(self, event: StepEvent) -> None:
        """Called after each optimizer step, before its checkpoint and validation."""

    def on_validation(self, event: ValidationEvent) -> None:
        """Called after each validation."""

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Called when a checkpoint is whole on disk."""

    def on_end(self, event: EndEvent) -> None:
        """Called when training has ended, after its last checkpoint."""


class Events(BaseCallback):
    """Passes the events of a run on to users' callbacks. Raises TypeError for one that is no `TrainCallback`."""

    def __init__(self, callbacks: Sequence[TrainCallback]) -> None:
        for callback in callbacks:
            if not isinstance(callback, TrainCallback):
                raise TypeError(f"callbacks are objects of classes derived from TrainCallback, not {callback!r}")
        self.callbacks = tuple(callbacks)
        self.failed = False  # True where a callback has raised, on any rank: no more is called
        self._common: dict[str, Any] = {}
        self._step = 0

    def begin(self, step: int, place: RunPlace, models: Mapping[str, nn.Module], stop: Callable[[], None]) -> None:
        """Set the parts that all events share."""
        self._step, self._common = step, {"folder": place.folder, "models": models, "stop": stop}
        self._common |= {"rank": place.rank, "world": place.world}

    def after_step(self, outcome: StepOutcome) -> None:
        self._step = outcome.step
        self._pass_on(lambda one: one.on_step(StepEvent(outcome.step, outcome=outcome, **self._common)))

    def validated(self, row: Mapping[str, Any]) -> None:
        """Pass on a validation. A collective call, as the others."""
        self._pass_on(lambda one: one.on_validation(ValidationEvent(self._step, row=row, **self._common)))

    def saved(self, step: int, path: Path) -> None:
        """Pass on a checkpoint that is whole on disk."""
        self._pass_on(lambda one: one.on_checkpoint(CheckpointEvent(step, path=path, **self._common)))

    def ended(self, finished: bool, loss: float | None) -> None:
        """Pass on the end."""
        self._pass_on(lambda one: one.on_end(EndEvent(self._step, finished=finished, loss=loss, **self._common)))

    def _pass_on(self, call: Callable[[TrainCallback], None]) -> None:
        """Call one method of all callbacks. An exception of one is raised on all ranks: else the others would wait for its rank."""
        if not self.callbacks or self.failed:
            return
        failure: Exception | None = None
        try:
            for callback in self.callbacks:
                call(callback)
        except Exception as error:
            failure = error
        problems = comm.all_gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        self.failed = any(problem is not None for problem in problems)
        if failure is not None:
            raise failure
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise UserError(f"a callback failed on rank {rank}: {problem}")
