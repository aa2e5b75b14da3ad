"""The sections `validate`, `sample` and `tracking`: what a run shows of itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .inputs import Section


class ValidateConfig(Section):
    """Held-out loss and samples during training, from the EMA weights."""

    every: int = Field(500, ge=1, description="Steps between two validations. The end of a run is always validated.")
    report: bool = Field(True, description="Write `report.html` at each validation.")
    samples: int = Field(16, ge=0, description="Held-out samples that the loss is computed on; 0: no held-out loss.")
    quantiles: int = Field(
        4,
        ge=1,
        le=100,
        description="Fixed timesteps a sample is evaluated at: the middles of this many equal parts of the training distribution.",
    )
    prompts: tuple[str, ...] = Field(
        (), description="Prompts to generate samples for during training, such as captions of videos."
    )
    clips: int | None = Field(
        None,
        ge=0,
        description="Held-out videos from whose first frames (as `conditioning` says) and captions samples are made, too; null: 2 without prompts for a model that is always given frames, else 0.",
    )
    seed: int = Field(0, description="Seed of the samples.")


class SampleConfig(Section):
    """Defaults of `mmspeed sample` and of the videos sampled during training."""

    steps: int | None = Field(
        None, ge=1, description="Steps of the sampler; null: 30, and for a published model its pipeline's own number."
    )
    guidance: float | None = Field(
        None,
        ge=0,
        description="Classifier-free guidance scale, or the scale that a guidance-distilled model is given; 1: none. Null: 4, and for a published model its pipeline's own.",
    )
    guidance_2: float | None = Field(
        None,
        ge=0,
        description="Guidance scale of the expert of low noise, of a published model with two; null: that of `guidance`. `guidance: 1` means none for both.",
    )
    guidance_rescale: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share by which a guided prediction gets the spread of the prediction with the caption, against overexposure (Lin et al. 2023, who use 0.7); 0: none.",
    )
    sampler: Literal["auto", "family", "euler", "heun", "ddim", "unipc", "dpm++"] = Field(
        "auto",
        description="`euler` or `heun` for flow, `ddim` for ddpm; `unipc` and `dpm++` (of diffusers) for both; `family`: the scheduler of a published model's repository; `auto`: euler or ddim, and for a published model `family`.",
    )
    negative_prompt: str = Field("", description="Prompt that guidance steers away from.")
    frames: int | None = Field(None, ge=1, description="Frames of the video; null: those of the first video bucket.")
    height: int | None = Field(None, ge=8, description="Height in pixels; null: that of the first video bucket.")
    width: int | None = Field(None, ge=8, description="Width in pixels; null: that of the first video bucket.")


class TrackingConfig(Section):
    """The name and contents of a run at its trackers."""

    project: str = Field(
        "mmspeed", min_length=1, description="Project of the run, at trackers that have projects (not TensorBoard)."
    )
    run: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run at the trackers; null: `name`. A resumed run goes on under its id, which `trackers.json` in its folder holds.",
    )
    videos: bool = Field(True, description="Log the videos sampled during training, with their prompts.")
