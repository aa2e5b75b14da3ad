"""The roles that a task's updates train, and the settings of their optimizers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pydantic import ValidationError
from torch import nn

from mmspeed.config.training import TrainConfig
from mmspeed.errors import UserError
from mmspeed.protocols import OptimizerSetting, Update


def learning_roles(
    task: str, updates: Sequence[Update], models: Mapping[str, nn.Module]
) -> dict[str, OptimizerSetting | None]:
    """The roles that learn, in the order of their updates, each with its optimizer's differences from the config.

    Raises UserError for updates of roles that the task does not build or that share weights, of the same name, with two settings for one
    role, and for steps without an update.
    """
    settings: dict[str, OptimizerSetting | None] = {}
    for update in updates:
        subject = f"the task {task}: update {update.name}"
        if update.role not in models:
            raise UserError(f"{subject} trains {update.role}; an update trains one of the roles {', '.join(models)}")
        if update.every < 1:
            raise UserError(f"{subject} is made at every {update.every}-th step: `every` is 1 or more")
        if update.when is not None and update.every > 1:
            raise UserError(f"{subject} has both `every` and `when`: each names its steps")
        if settings.setdefault(update.role, update.optimizer) != update.optimizer:
            raise UserError(
                f"{subject} has another optimizer setting for the role {update.role} than an update before it"
            )
    names = [update.name for update in updates]
    if len(set(names)) < len(names):
        raise UserError(f"the task {task} has updates of one name, {', '.join(names)}: terms are named by it")
    if all(update.every > 1 and update.when is None for update in updates):
        raise UserError(
            f"the task {task} has no update that is made at every step: {', '.join(names) or 'none at all'}"
        )
    _check_owners(task, models, settings)
    return settings


def own_train(train: TrainConfig, setting: OptimizerSetting | None) -> TrainConfig:
    """The config's section with an update's own optimizer settings. Raises UserError for one that the section does not take."""
    if setting is None:
        return train
    if not (setting.lr_factor > 0 and math.isfinite(setting.lr_factor)):
        raise UserError(f"an update's lr_factor is {setting.lr_factor:g}: it is above 0")
    overrides = {"betas": setting.betas, "eps": setting.eps, "weight_decay": setting.weight_decay}
    changed = {key: value for key, value in overrides.items() if value is not None}
    try:
        return type(train).model_validate({**train.model_dump(), **changed})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"an update's optimizer setting: {problems}") from None


def _check_owners(task: str, models: Mapping[str, nn.Module], learning: Collection[str]) -> None:
    """Raise UserError where a parameter that trains belongs to two roles: each would change it, or one would freeze it."""
    owners: dict[nn.Parameter, str] = {}
    for role in sorted(models, key=lambda role: role not in learning):
        for name, parameter in models[role].named_parameters():
            if parameter.requires_grad and owners.setdefault(parameter, role) != role and owners[parameter] in learning:
                raise UserError(
                    f"the task {task}: the roles {owners[parameter]} and {role} share `{name}`, which trains: "
                    "give each its own, or build one model of both"
                )
