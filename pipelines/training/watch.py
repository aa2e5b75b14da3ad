"""The watch over a run of training: its watchdog, the record of its attempts, and the times of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from torch import nn

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.loop.watch.phases import RunPhase
from mmspeed.loop.watch.rank_times import RankTimes
from mmspeed.loop.watch.watchdog import Watchdog
from mmspeed.pipelines.run.attempts import AttemptRecord
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import Data, ShapeClass, StepData

log = get_logger("train")


class RunWatch:
    """Context of a run, which says where it is. `online`: its first epoch may wait for encoders."""

    def __init__(self, config: RunConfig, folder: RunFolder, rank: int, world: int, online: bool) -> None:
        self.config, self.rank, self.online = config.train.watchdog, rank, online
        self.watchdog = Watchdog(self.config, rank, world)
        self.record = AttemptRecord.of_launcher(folder.root / "attempt.json", rank)
        self._seen: set[ShapeClass] = set()
        self._encoding = False

    def __enter__(self) -> RunWatch:
        self.watchdog.enter(RunPhase.SET_UP, 0)
        self.watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watchdog.__exit__(kind, error, trace)

    def begin(self, step: int) -> None:
        """Begin an attempt after `step` steps. Raises UserError where two attempts in a row failed in one place. A collective call."""

        def look() -> None:
            last = self.record.begin(step)
            if last is None:
                return
            if last.again:
                raise UserError(last.sentence())
            log.info(f"attempt {last.attempt + 2}: the last one ended at {last.place}; going on after step {step}")

        comm.first_does(look, self.rank)

    def times(self, models: Mapping[str, nn.Module], data: Data, device: Device) -> RankTimes:
        """The times of all ranks, as a callback."""
        return RankTimes(list(models.values()), lambda: data.waited_seconds, device, self.config)

    def waiting(self, step: int, epoch: int) -> None:
        """Begin step number `step`, from 1, with the wait for its data."""
        self._encoding = self.online and epoch == 0
        self.watchdog.enter(RunPhase.ENCODING if self._encoding else RunPhase.STEP, step)
        self.record.at(step, "step")

    def step(self, step: int, data: StepData) -> None:
        """Go on with the step, whose data have come."""
        if not self._encoding and not self._seen.issuperset(data.counts):
            self.watchdog.enter(RunPhase.FIRST_STEP, step)
        self._seen.update(data.counts)
        self.record.at(step, "step", data)

    def enter(self, part: Literal["checkpoint", "validation"], step: int) -> None:
        """Begin the checkpoint or the validation after step number `step`."""
        self.watchdog.enter(RunPhase(part), step)
        self.record.at(step, part)

    def ended(self) -> None:
        """Note that the attempt did not fail."""
        self.watchdog.enter(RunPhase.IDLE, 0)
        self.record.end()
