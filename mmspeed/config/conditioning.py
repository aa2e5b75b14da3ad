"""The config section `conditioning`: the modes in which a model is trained to be given frames of a video, and their shares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .inputs import Section

Mode = Literal["none", "first", "first_last", "prefix", "mask"]

MODES: tuple[Mode, ...] = ("none", "first", "first_last", "prefix", "mask")
ROUNDING = 1e-9


class ConditioningConfig(Section):
    """Shares of the uses of videos in which some of the latent frames are given to the model: they carry no noise and have no loss."""

    none: float | None = Field(
        None, ge=0, le=1, description="Share of uses in which no frame is given; null: what the other modes leave."
    )
    first: float = Field(0.0, ge=0, le=1, description="Share in which the first frame is given: a video from an image.")
    first_last: float = Field(0.0, ge=0, le=1, description="Share in which the first and the last frame are given.")
    prefix: float = Field(
        0.0, ge=0, le=1, description="Share in which the first `prefix_frames` are given: continuation of a video."
    )
    prefix_frames: int = Field(
        9, ge=1, description="Frames of pixels that `prefix` gives: 1, and a multiple of the codec's stride along time."
    )
    mask: float = Field(
        0.0, ge=0, le=1, description="Share in which any latent frames are given: their number and places are drawn."
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> ConditioningConfig:
        total = self.first + self.first_last + self.prefix + self.mask + (self.none or 0.0)
        if total > 1 + ROUNDING:
            raise ValueError(f"the shares of the modes are {total:g} together: at most 1")
        if self.none is not None and total < 1 - ROUNDING:
            raise ValueError(f"the shares of the modes are {total:g} together: with `none` they are 1, or leave it out")
        return self

    @property
    def shares(self) -> dict[Mode, float]:
        """The share of each mode that is used, in a fixed order; they are 1 together."""
        given: dict[Mode, float] = {
            "first": self.first,
            "first_last": self.first_last,
            "prefix": self.prefix,
            "mask": self.mask,
        }
        none = max(0.0, 1.0 - sum(given.values()))
        return {mode: share for mode, share in ({"none": none} | given).items() if share > ROUNDING}  # type: ignore[misc]

    @property
    def gives_frames(self) -> bool:
        """True where a mode other than `none` is used."""
        return set(self.shares) != {"none"}
