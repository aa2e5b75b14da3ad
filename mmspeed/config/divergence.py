"""The config section of the rule for spikes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .inputs import Section


class DivergenceConfig(Section):
    """The rule for spikes: a loss or a gradient norm far above those of the steps before, or one that is not finite."""

    action: Literal["none", "stop", "skip", "roll_back"] = Field(
        "stop",
        description="`stop`: end the run after `steps` steps above the limit in a row. `skip`: do not apply the update of a step above it, and end the run after `steps` of them in a row. `roll_back`: after `steps` in a row go back to a checkpoint from before them, and leave their samples out of this epoch. `none`: no rule.",
    )
    factor: float = Field(
        10.0, gt=1, description="Multiple of the median of the last `window` calm steps that is the limit."
    )
    steps: int = Field(
        5,
        ge=1,
        description="Steps in a row above the limit that make a spike, and calm steps after a checkpoint that make it sound.",
    )
    window: int = Field(
        100,
        ge=2,
        description="Calm steps that the median is of; before as many, losses alone are judged, by the first ones and that of a model that knows nothing.",
    )
    roll_backs: int = Field(3, ge=1, description="Roll-backs of a run; the next spike ends it.")
