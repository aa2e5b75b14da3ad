"""The section `objective`: what the model learns to predict, and at which times."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

from .published import FamilyObjectiveConfig
from .shift import ShiftConfig, checked_range, checked_shift
from .training import Weighting, WeightingSection


class ObjectiveSection(WeightingSection):
    """Base of the sections of objectives of diffusion."""

    samplers: ClassVar[tuple[str, ...]]  # names of `sample.sampler` that fit; `auto` takes the first

    weighting: Weighting = Field(
        "sample",
        description="What counts alike in the gradients of an epoch. `sample`: samples, whatever their buckets and whatever `batching` is; `token`: tokens of the model, so that a sample counts by its length; `step`: steps, so that a sample's share depends on `batching` (and, without `slots`, on the number of devices). Runs from before this key have `step`.",
    )
    range: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest model time that is trained, from 0 (data) to 1 (noise): the distribution of times is cut there. Null: all.",
    )
    guidance: float | None = Field(
        None,
        ge=0,
        description="Scale that a guidance-distilled model is given in training; null: its pipeline's own. Other models take none.",
    )

    boundary: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Model time from which on a step trains the expert in `model.subfolder`; below it that in `model.second_subfolder`. `experts: both` of a published model's own objective sets it. Null: one model for all times.",
    )
    high_share: float = Field(
        0.5, gt=0, lt=1, description="With `boundary`, the share of steps that train the expert of times above it."
    )

    _range = field_validator("range")(checked_range)

    @model_validator(mode="after")
    def _experts(self) -> ObjectiveSection:
        if self.boundary is not None and self.range is not None:
            raise ValueError("boundary divides all times between two experts: leave range out")
        return self


class FlowConfig(ObjectiveSection):
    """Rectified flow: straight lines from data to noise, velocity prediction."""

    samplers: ClassVar[tuple[str, ...]] = ("euler", "heun", "unipc", "dpm++")

    kind: Literal["flow"] = Field(description="Rectified flow.")
    timesteps: Literal["uniform", "logit_normal"] = Field(
        "logit_normal", description="Distribution that training times are drawn from."
    )
    logit_mean: float = Field(0.0, description="Mean of the logit-normal distribution.")
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of the logit-normal distribution.")
    shift: float | Literal["auto"] | dict[str, float] = Field(
        1.0,
        description="Timestep shift s > 0: t' = s t / (1 + (s - 1) t), in training and in sampling. Above 1, more timesteps are near noise, as large videos need. `auto`: by the number of tokens of the model (`auto_shift`). `{13x96x160: 3.0, ...}`: a number for each bucket.",
    )
    auto_shift: ShiftConfig | None = Field(
        None,
        description="Formula of `shift: auto`; null: the square root of the number of tokens of the model, 1 at 256.",
    )

    _shift = field_validator("shift", mode="before")(checked_shift)

    @model_validator(mode="after")
    def _auto(self) -> FlowConfig:
        if self.shift != "auto" and self.auto_shift is not None:
            raise ValueError("auto_shift goes with shift: auto")
        return self

    def shift_of(self, bucket: Bucket, tokens: int) -> float:
        """The shift of samples of a bucket, of `tokens` tokens each. Raises UserError for a bucket without one."""
        if isinstance(self.shift, float):
            return self.shift
        if isinstance(self.shift, dict):
            if str(bucket) not in self.shift:
                raise UserError(
                    f"objective.shift has no number for {bucket}: add it, use one of {', '.join(self.shift)}, or shift: auto"
                )
            return self.shift[str(bucket)]
        try:
            return (self.auto_shift or ShiftConfig()).shift(tokens)
        except ValueError as error:
            raise UserError(f"objective.shift: auto has no shift for {bucket}: {error}") from None


class DdpmConfig(ObjectiveSection):
    """Discrete diffusion with epsilon- or v-prediction."""

    samplers: ClassVar[tuple[str, ...]] = ("ddim", "unipc", "dpm++")

    kind: Literal["ddpm"] = Field(description="Denoising diffusion.")
    steps: int = Field(1000, ge=2, description="Number of training timesteps.")
    schedule: Literal["linear", "scaled_linear", "cosine"] = Field(
        "scaled_linear", description="Noise schedule, as diffusers names it (`cosine` is its squaredcos_cap_v2)."
    )
    beta_start: float = Field(0.00085, gt=0, lt=1, description="First beta of the linear schedules.")
    beta_end: float = Field(0.012, gt=0, lt=1, description="Last beta of the linear schedules.")
    prediction: Literal["v", "epsilon"] = Field("v", description="Quantity that the model predicts.")
    zero_terminal_snr: bool = Field(
        True, description="Rescale the schedule so that the last timestep is pure noise (needs v-prediction)."
    )
    snr_shift_scale: float = Field(
        1.0,
        gt=0,
        description="Divisor of the signal-to-noise ratio of every timestep, before it is rescaled: above 1 there is more noise. CogVideoX-2b has 3.",
    )
    min_snr_gamma: float | None = Field(
        None, gt=0, description="Cap of the signal-to-noise weight of the loss (min-SNR, often 5); null: no weighting."
    )
    allow_zero_weight: bool = Field(
        False,
        description="Take `min_snr_gamma` with `zero_terminal_snr` and v-prediction although its weight at pure noise is 0, so that the first step of sampling is not trained.",
    )

    @model_validator(mode="after")
    def _terminal(self) -> DdpmConfig:
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr needs prediction: v (epsilon carries no information about the data at pure noise); set zero_terminal_snr: false"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_trained(self) -> DdpmConfig:
        untrained = self.min_snr_gamma is not None and self.zero_terminal_snr and self.prediction == "v"
        if untrained and not self.allow_zero_weight:
            raise ValueError(
                "min_snr_gamma with zero_terminal_snr and prediction: v has the weight 0 at pure noise, where sampling begins; "
                "leave min_snr_gamma out, set zero_terminal_snr: false, or force it by allow_zero_weight: true"
            )
        if self.allow_zero_weight and not untrained:
            raise ValueError("allow_zero_weight goes with min_snr_gamma, zero_terminal_snr and prediction: v")
        return self


ObjectiveConfig = Annotated[FlowConfig | DdpmConfig | FamilyObjectiveConfig, Field(discriminator="kind")]
