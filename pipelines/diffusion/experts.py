"""Models of two experts, one for times near noise and one for times near data: which one a step trains, and which one predicts.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mmspeed.config.schema import Config, ObjectiveConfig, ObjectiveSection, PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion.samplers import Predict
from mmspeed.rng import uniform

Expert = Literal["high", "low"]  # of times near noise, and near data
EXPERTS: tuple[Expert, Expert] = ("high", "low")


@dataclass(frozen=True)
class TrainedExperts:
    """Two experts that a run trains, one in each step.

    Args:
        boundary: the model time from which on the expert `high` predicts.
        high_share: the share of steps that train it.
        roles: of both, by expert; that of `low` is its folder in the repository.
    """

    boundary: float
    high_share: float
    roles: Mapping[Expert, str]

    def drawn(self, seed: int, step: int) -> Expert:
        """The expert that step number `step`, from 0, trains, drawn by name (law 1)."""
        return "high" if uniform(seed, "expert", step) < self.high_share else "low"


@dataclass(frozen=True)
class OtherExpert:
    """The expert that samples beside a model. `noise`: its own times; `boundary`: where those of `high` begin."""

    model: nn.Module
    boundary: float
    noise: Expert

    def switched(self, own: Predict, other: Predict) -> Predict:
        """The prediction of the model's or of this expert's function, by the time."""
        high, low = (other, own) if self.noise == "high" else (own, other)
        boundary = torch.tensor(self.boundary, dtype=torch.float32)  # as times are

        def predict(x_BCThw: Tensor, t_B: Tensor) -> Tensor:
            # all samples of a batch have one time
            return (high if bool(t_B.flatten()[0].float().cpu() >= boundary) else low)(x_BCThw, t_B)

        return predict


def experts_of(config: Config) -> TrainedExperts | None:
    """The two experts that a completed config trains; None for one model. Raises UserError where one of their two keys is missing."""
    model, objective = config.model, config.objective
    folder = model.second_subfolder if isinstance(model, PublishedModelConfig) else None
    boundary = objective.boundary if isinstance(objective, ObjectiveSection) else None
    if folder is None and boundary is None:
        return None
    if folder is None or boundary is None:
        raise UserError(
            "objective.boundary and model.second_subfolder go together: they divide all times between two published models; "
            "objective: {kind: family, experts: both} sets them"
        )
    assert isinstance(objective, ObjectiveSection)
    return TrainedExperts(boundary, objective.high_share, {"high": "model", "low": folder})


def objective_of_expert(objective: ObjectiveConfig, expert: Expert) -> ObjectiveConfig:
    """The section of one of two experts: the same with its range of times. Raises ValueError without a boundary."""
    if not isinstance(objective, ObjectiveSection) or objective.boundary is None:
        raise ValueError("the objective has no boundary between two experts")
    times = (objective.boundary, 1.0) if expert == "high" else (0.0, objective.boundary)
    return objective.model_copy(update={"boundary": None, "range": times})


def config_of_high(config: Config) -> Config:
    """A completed config of both experts with that of high noise alone; any other as it is."""
    model = config.model
    if experts_of(config) is None:
        return config
    assert isinstance(model, PublishedModelConfig)
    alone = model.model_copy(update={"second_subfolder": None})
    return config.model_copy(update={"model": alone, "objective": objective_of_expert(config.objective, "high")})
