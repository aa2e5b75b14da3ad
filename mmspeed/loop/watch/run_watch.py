"""The watch over a run of training: its watchdog, the times of its ranks, and the record of its attempts.

The record is the place that a run has reached, kept for the attempts that follow: a place that fails twice in a row ends the run.
`attempt.json` in the run's folder is written by rank 0 before each step, checkpoint and validation where a launcher starts the run again
by itself. It is not flushed to the disk: it outlives the processes, not the machine, and then nothing is known of the last attempt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from mmspeed import comm
from mmspeed.config.training import WatchdogConfig
from mmspeed.device import Device
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.protocols import Data, ShapeClass, StepData

from .rank_times import RankTimes
from .watchdog import Place, RunPhase, Watchdog

log = get_logger("train")

NAMED = 16  # samples of a step that a message names


@dataclass(frozen=True)
class LastAttempt:
    """The end of an attempt: its number and place, the samples of a step that had failed before, and the place of the failure before it."""

    attempt: int
    place: Place
    samples: tuple[str, ...] = ()
    before: Place | None = None

    @property
    def again(self) -> bool:
        """True where two attempts in a row failed in one place. Set-up may fail as often as the launcher tries."""
        return self.place == self.before and self.place.part != "set-up"

    def sentence(self) -> str:
        """The reason not to try once more."""
        what = f"; its samples: {first_names(self.samples, NAMED)}" if self.samples else ""
        return (
            f"{self.place} failed in two attempts in a row, so the run ends{what}. The lines of both attempts say how it failed; "
            "the same command tries again"
        )


def parse(text: str, launch: str) -> LastAttempt | None:
    """The end of the last attempt of a launch; None where the record is of another launch, or cut off."""
    try:
        record = json.loads(text)
        if record["launch"] != launch:
            return None
        before = None if record["before"] is None else Place(**record["before"])
        return LastAttempt(record["attempt"], Place(**record["place"]), tuple(record["samples"]), before)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class AttemptRecord:
    """The record of a run. Without `launch`, the name of a launcher's run that is started again by itself, it does nothing."""

    def __init__(self, path: Path, launch: str | None) -> None:
        self.path, self.launch = path, launch
        self.last: LastAttempt | None = None
        self._attempt = 0
        self._file: int | None = None

    @classmethod
    def of_launcher(cls, path: Path, rank: int) -> AttemptRecord:
        """The record of the run that this process's launcher restarts."""
        again = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
        return cls(path, os.environ.get("TORCHELASTIC_RUN_ID", "") if again and rank == 0 else None)

    def begin(self, step: int) -> LastAttempt | None:
        """Begin an attempt after `step` steps; the end of the one before it, if that failed. A second failure is then forgotten."""
        if self.launch is None:
            return None
        if self.path.is_symlink():  # what it names is another's
            self.path.unlink()
        if self.path.exists():
            self.last = parse(self.path.read_text(encoding="utf-8"), self.launch)
        if self.last is not None and self.last.again:
            self.path.unlink()
            return self.last
        self._attempt = 0 if self.last is None else self.last.attempt + 1
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)
        self._write(Place(step, "set-up"), ())
        return self.last

    def at(self, step: int, part: str, data: StepData | None = None) -> None:
        """Note the place that the run is at; with the samples of `data` where the last attempt failed in it."""
        if self._file is None:
            return
        place = Place(step, part)
        failed_here = self.last is not None and self.last.place == place
        self._write(place, tuple(item.source for item in data.items) if failed_here and data is not None else ())

    def end(self) -> None:
        """Forget all, as the attempt did not fail."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self.path.unlink(missing_ok=True)

    def _write(self, place: Place, samples: tuple[str, ...]) -> None:
        assert self._file is not None
        before = None if self.last is None else asdict(self.last.place)
        record = {
            "launch": self.launch,
            "attempt": self._attempt,
            "place": asdict(place),
            "samples": samples,
            "before": before,
        }
        text = json.dumps(record).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))


class RunWatch(Watchdog):
    """Watchdog of a run, with its record. `online`: the first epoch may wait for encoders."""

    def __init__(self, config: WatchdogConfig, folder: Path, rank: int, world: int, online: bool) -> None:
        super().__init__(config, rank, world)
        self.online = online
        self.record = AttemptRecord.of_launcher(folder / "attempt.json", rank)
        self._seen: set[ShapeClass] = set()
        self._encoding = False
        self.enter(RunPhase.SET_UP, 0)

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

    def times(
        self, models: Mapping[str, nn.Module], data: Data, device: Device, ledger: comm.Ledger, alike: int
    ) -> RankTimes:
        """The times of all ranks, as a callback. `alike`: as many in a row do the same work."""
        return RankTimes(list(models.values()), lambda: data.waited_seconds, device, self.config, ledger, alike)

    def waiting(self, step: int, epoch: int) -> None:
        """Begin step number `step`, from 1, with the wait for its data."""
        self._encoding = self.online and epoch == 0
        self.enter(RunPhase.ENCODING if self._encoding else RunPhase.STEP, step)
        self.record.at(step, "step")

    def step(self, step: int, data: StepData) -> None:
        """Go on with the step, whose data have come."""
        if not self._encoding and not self._seen.issuperset(data.counts):
            self.enter(RunPhase.FIRST_STEP, step)
        self._seen.update(data.counts)
        self.record.at(step, "step", data)

    def enter_part(self, part: Literal["checkpoint", "validation"], step: int) -> None:
        """Begin the checkpoint or the validation after step number `step`."""
        self.enter(RunPhase(part), step)
        self.record.at(step, part)

    def ended(self) -> None:
        """Note that the attempt did not fail."""
        self.enter(RunPhase.IDLE, 0)
        self.record.end()
