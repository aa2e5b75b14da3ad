"""The state of a run between two steps, with all that its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmspeed.loop.guard import Guard
from mmspeed.pipelines.run.assembly import Assembly, Placement
from mmspeed.protocols import Data, RunPlace, Task

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
    step: int = 0  # of the next step
