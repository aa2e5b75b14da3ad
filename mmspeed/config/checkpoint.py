"""The section `checkpoint`: when a run is saved, where, and what is kept."""

from __future__ import annotations

from pydantic import Field

from .inputs import Section


class CheckpointConfig(Section):
    """Saving of a run's state."""

    every: int = Field(500, ge=1, description="Steps between two checkpoints. The end of a run is always saved.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: bool = Field(True, description="Also keep the checkpoint with the lowest validation loss.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep each checkpoint whose step is a multiple of this; null: none for its step."
    )
    keep_hours: float | None = Field(
        None,
        gt=0,
        description="Also keep the first checkpoint of each period of this many hours; null: none for its time.",
    )
    asynchronous: bool = Field(True, description="Write in the background while training continues.")
    local: str | None = Field(
        None,
        description="Folder on each node's own disk where checkpoints are written first, and from which a restart reads them if every node has its part; null: none.",
    )
    keep_local: int = Field(1, ge=1, description="Number of newest checkpoints to keep in `local`.")
    grace_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds from SIGTERM or SIGUSR1 until the process is killed, near whose end a line says if nothing was saved. Null: those of torch's launcher, in a Slurm job at most 30; after SIGUSR1 those to the end of the job.",
    )
