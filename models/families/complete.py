"""Complete a config by its model's repository: the objective that a published model was trained with, and its sampler."""

from __future__ import annotations

from typing import Any

from mmspeed.config.schema import (
    Config,
    DdpmConfig,
    FamilyObjectiveConfig,
    FlowConfig,
    ObjectiveConfig,
    PublishedModelConfig,
)
from mmspeed.errors import UserError
from mmspeed.models.build import repository_of

Scheduler = dict[str, Any]  # the contents of scheduler_config.json


def completed(config: Config) -> Config:
    """The config with the objective of its model's repository in place of `objective: {kind: family}`; others stay as they are.

    Raises UserError for a model without a repository, and for a scheduler that no objective is known for.
    """
    section = config.objective
    if not isinstance(section, FamilyObjectiveConfig):
        return config
    if not isinstance(config.model, PublishedModelConfig):
        raise UserError(
            "objective.kind: family is that of a published model: set model.kind: diffusers, or kind: flow or ddpm"
        )
    objective = objective_of(repository_of(config.model).config("scheduler"), section)
    return config.model_copy(update={"objective": objective})


def objective_of(scheduler: Scheduler, section: FamilyObjectiveConfig) -> ObjectiveConfig:
    """The objective of a repository's scheduler. Raises UserError for a scheduler that is not known."""
    name = scheduler.get("_class_name", "")
    if "CogVideoX" in name or scheduler.get("prediction_type") == "v_prediction":
        return DdpmConfig(
            kind="ddpm",
            weighting=section.weighting,
            steps=scheduler.get("num_train_timesteps", 1000),
            schedule=scheduler.get("beta_schedule", "scaled_linear"),
            beta_start=scheduler.get("beta_start", 0.00085),
            beta_end=scheduler.get("beta_end", 0.012),
            zero_terminal_snr=scheduler.get("rescale_betas_zero_snr", False),
        )
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    if shift is None:
        raise UserError(
            f"model.pretrained: no objective is known for the scheduler {name}: write the section `objective`"
        )
    return FlowConfig(kind="flow", weighting=section.weighting, shift=float(shift))
