"""The config section of the watchdog."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .inputs import Section

WatchedPhase = Literal["set_up", "first_step", "step", "encoding", "checkpoint", "validation"]


class WatchdogConfig(Section):
    """Limits of time, past which a process says where it is and is then ended, so that its launcher starts the run again."""

    enabled: bool = Field(True, description="Watch the run.")
    least_seconds: float = Field(60.0, gt=0, description="Limit of a step, a checkpoint and a validation, at least.")
    factor: float = Field(
        10.0, ge=1, description="Multiple of the median duration of such a phase that is its limit, if that is longer."
    )
    first_seconds: float = Field(
        1800.0,
        gt=0,
        description="Limit of set-up, of the first step of each shape (compilation, connections), of steps of the first epoch that may wait for encoders, and of the first checkpoint and validation.",
    )
    limits: dict[WatchedPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Limits in seconds in place of these, by phase, such as `{validation: 3600}`."
    )
    silent_seconds: float = Field(
        600.0,
        gt=0,
        description="Time without a sign of life after which a rank is killed; it is named after `least_seconds`.",
    )
    slow_factor: float = Field(
        1.25, gt=1, description="Multiple of the other ranks' median computing time from which a rank is named as slow."
    )
    slow_steps: int = Field(20, ge=1, description="Steps over which ranks are compared, at least.")
    end: bool = Field(
        True,
        description="End a process past twice its limit, where a launcher started it. False: only say where it is.",
    )
