"""The config section of `objective.shift: auto`, and the checks of a shift by bucket."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from .inputs import Section

BUCKET = re.compile(r"[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*")  # frames, height, width
LARGEST_EXPONENT = 7.0  # of an exponential; beyond it half of all times lie within a thousandth of one end


class ShiftConfig(Section):
    """Timestep shift by the number of a sample's tokens of the model, for `objective.shift: auto`."""

    rule: Literal["sqrt", "exponential", "linear"] = Field(
        "sqrt",
        description="Formula of the shift. `sqrt`: base_shift x sqrt(tokens / base_tokens) (Stable Diffusion 3). `exponential`: "
        "exp(m), and `linear`: m, for m on a line over the tokens, as diffusers' schedulers shift dynamically.",
    )
    base_tokens: int = Field(256, ge=1, description="Number of tokens at which `base_shift` holds.")
    base_shift: float | None = Field(
        None, description="Shift, or m, at `base_tokens`; null: 1 for `sqrt`, 0.5 for the others."
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Number of tokens at which `max_shift` holds; null: 4096. Not with `sqrt`."
    )
    max_shift: float | None = Field(
        None,
        description="The m at `max_tokens`; null: 1.15. The line goes on beyond it: a long video may need less. Not with `sqrt`.",
    )

    @model_validator(mode="after")
    def _fits_the_rule(self) -> ShiftConfig:
        if self.rule == "sqrt":
            needless = next((name for name in ("max_tokens", "max_shift") if getattr(self, name) is not None), None)
            if needless is not None:
                raise ValueError(f"{needless} goes with rule: exponential or linear, not with sqrt")
        elif self.ends[1] <= self.base_tokens:
            raise ValueError(f"max_tokens {self.ends[1]} must be above base_tokens {self.base_tokens}")
        if self.rule != "exponential" and min(self.ends[0], self.ends[2]) <= 0:
            raise ValueError(f"with rule: {self.rule} base_shift and max_shift must be above 0")
        return self

    @property
    def ends(self) -> tuple[float, int, float]:
        """(base_shift, max_tokens, max_shift) with the rule's defaults; the last two mean nothing for `sqrt`."""
        base = self.base_shift if self.base_shift is not None else 1.0 if self.rule == "sqrt" else 0.5
        return base, self.max_tokens or 4096, 1.15 if self.max_shift is None else self.max_shift

    def on_line(self, tokens: int) -> float:
        """The m of a sample of `tokens` tokens, for rules other than `sqrt`."""
        base, most, top = self.ends
        slope = (top - base) / (most - self.base_tokens)
        return tokens * slope + (base - slope * self.base_tokens)  # in the order of diffusers' calculate_shift

    def shift(self, tokens: int) -> float:
        """The shift of a sample of `tokens` tokens. Raises ValueError where a line has fallen to 0 or an exponential is too large."""
        if self.rule == "sqrt":
            return self.ends[0] * math.sqrt(tokens / self.base_tokens)
        m = self.on_line(tokens)
        if self.rule == "linear" and m <= 0:
            raise ValueError(f"the line of objective.auto_shift is {m:.3g} at {tokens} tokens; a shift is above 0")
        if self.rule == "exponential" and abs(m) > LARGEST_EXPONENT:
            raise ValueError(
                f"the shift of objective.auto_shift is exp({m:.3g}) at {tokens} tokens; "
                "choose base_tokens and max_tokens near the samples' tokens, or rule: sqrt"
            )
        return math.exp(m) if self.rule == "exponential" else m


def checked_shift(value: Any) -> Any:
    """The value of `objective.shift`: a number above 0, "auto", or numbers by bucket. Raises ValueError for anything else."""
    if value == "auto":
        return value
    if isinstance(value, dict):
        if not value:
            raise ValueError("by bucket it needs one at least, such as {13x96x160: 3.0}")
        for bucket, number in value.items():
            if not (isinstance(bucket, str) and BUCKET.fullmatch(bucket)):
                raise ValueError(f"{bucket!r} is no bucket: write frames x height x width, such as 13x96x160")
            if not _positive(number):
                raise ValueError(f"the shift of {bucket} is {number!r}; it must be a number above 0")
        return {bucket: float(number) for bucket, number in value.items()}
    if not _positive(value):
        raise ValueError("must be a number above 0, auto, or numbers by bucket such as {13x96x160: 3.0}")
    return float(value)


def checked_range(value: tuple[float, float] | None) -> tuple[float, float] | None:
    """The value of `objective.range`. Raises ValueError for ends out of order or outside of [0, 1]."""
    if value is not None and not 0 <= value[0] < value[1] <= 1:
        raise ValueError("must be [low, high] with 0 <= low < high <= 1, such as [0.875, 1]")
    return value


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
