"""The state of a run between two steps, with all that its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmspeed.pipelines.run.assembly import Assembly, Placement
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.training.spikes import SpikeGuard
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
    spikes: SpikeGuard
    step: int = 0  # of the next step
    skipped: int = 0  # steps left out so far because of a value that was not finite
    left_out: int = 0  # uses of samples left out so far, without which the rest of a step was computed again
