"""Complete a config by its model's repository: the objective that a published model was trained with, and its sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspeed.config.schema import (
    Config,
    DdpmConfig,
    FamilyObjectiveConfig,
    FlowConfig,
    ObjectiveConfig,
    PublishedModelConfig,
    SampleConfig,
    ShiftConfig,
)
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import family_of
from mmspeed.models.families.base import Sampling
from mmspeed.models.sections import repository_of

Scheduler = dict[str, Any]  # the contents of scheduler_config.json
STEPS, GUIDANCE = 30, 4.0  # of sampling from models of our own
EXPERTS = {"high": "transformer", "low": "transformer_2"}  # folders of the two experts of a repository
SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine"}
# facts of a scheduler, which an objective written by hand is held against
FACTS = (
    "shift", "auto_shift", "steps", "schedule", "beta_start", "beta_end", "prediction", "zero_terminal_snr", "snr_shift_scale",
)  # fmt: skip
PREDICTIONS = {"v_prediction": "v", "epsilon": "epsilon"}


def completed(config: Config, opened: Repository | None = None) -> Config:
    """The config with every choice made that depends on the model's repository: objective, expert, sampler and its numbers.

    `opened`: the repository, as of `opened_of`. Of a completed config, and of a model of our own, nothing else changes. Raises UserError
    for an objective of a repository without a published model, for a scheduler that no objective is known for, and for an expert of a
    model that has none.
    """
    section, model = config.objective, config.model
    if not isinstance(model, PublishedModelConfig):
        if isinstance(section, FamilyObjectiveConfig):
            raise UserError(
                "objective.kind: family is that of a published model: set model.kind: diffusers, or kind: flow or ddpm"
            )
        return config.model_copy(update={"sample": completed_sample(config.sample, Sampling(STEPS, GUIDANCE))})
    sample = config.sample
    if not isinstance(section, FamilyObjectiveConfig) and None not in (sample.steps, sample.guidance):
        if sample.sampler != "auto":
            return config
    changes: dict[str, Any] = {}
    repository = repository_of(model, opened)
    if isinstance(section, FamilyObjectiveConfig):
        section, model = of_expert(repository, section, model)
        objective = objective_of(repository.config("scheduler"), section)
        if section.experts is not None:
            objective = objective.model_copy(
                update={"boundary": boundary_of(repository), "high_share": section.high_share}
            )
        changes = {"objective": objective, "model": model}
        if model is not config.model:
            repository = repository_of(model, repository)
    sampling = family_of(repository.class_name, repository.key).sampling_of(repository.index)
    if sample.sampler == "auto" and repository.has("scheduler"):
        sample = sample.model_copy(update={"sampler": "family"})
    return config.model_copy(update={**changes, "sample": completed_sample(sample, sampling)})


def objective_warnings(config: Config, opened: Repository | None = None) -> list[str]:
    """The differences between an objective written by hand and that of the model's repository; none where there is no repository.

    Also none where its scheduler is of no known objective.
    """
    written, model = config.objective, config.model
    if isinstance(written, FamilyObjectiveConfig) or not isinstance(model, PublishedModelConfig):
        return []
    try:
        scheduler = repository_of(model, opened).config("scheduler")
        own = objective_of(scheduler, FamilyObjectiveConfig(kind="family"))
    except UserError:
        return []
    if written.kind != own.kind:
        differences = [f"kind is {written.kind}, the scheduler's {own.kind}"]
    else:
        mine, theirs = written.model_dump(), own.model_dump()
        names = [name for name in FACTS if mine.get(name) != theirs.get(name)]
        differences = [f"{name} is {mine[name]}, the scheduler's {theirs[name]}" for name in names]
    words = f"objective is not the one that {model.pretrained} was trained with: {'; '.join(differences)}"
    return [f"{words}; leave the section out, or set kind: family"] if differences else []


def completed_sample(sample: SampleConfig, sampling: Sampling) -> SampleConfig:
    """The section with a number of steps and a guidance, where it names none."""
    steps = sampling.steps if sample.steps is None else sample.steps
    guidance = sampling.guidance if sample.guidance is None else sample.guidance
    return sample.model_copy(update={"steps": steps, "guidance": guidance})


def of_expert(
    repository: Repository, section: FamilyObjectiveConfig, model: PublishedModelConfig
) -> tuple[FamilyObjectiveConfig, PublishedModelConfig]:
    """The sections of the expert that the objective names, with its range of times and its folder.

    With `experts: both` the model has both folders. Raises UserError for a model of two experts of which none is named, and for an expert
    of a model that has one.
    """
    boundary = boundary_of(repository)
    if section.expert is None and section.experts is None:
        if boundary is not None and section.range is None:
            raise UserError(
                f"model.pretrained: {repository.pretrained} has two experts, of times above and below {boundary}: set objective.expert "
                "to high or low, or objective.experts to both"
            )
        return section, model
    if boundary is None:
        key = "expert" if section.experts is None else "experts"
        raise UserError(f"objective.{key}: {repository.pretrained} has one transformer for all times: leave {key} out")
    if section.experts is not None:
        if model.weights is not None:
            raise UserError("model.weights is one file, and objective.experts: both trains two models: leave one out")
        high, low = EXPERTS["high"], EXPERTS["low"]
        for folder in (high, low):
            repository.of(folder)  # there is one, or an error that lists the folders
        return section, model.model_copy(update={"subfolder": high, "second_subfolder": low})
    times = (boundary, 1.0) if section.expert == "high" else (0.0, boundary)
    assert section.expert is not None
    return (
        section.model_copy(update={"range": times}),
        model.model_copy(update={"subfolder": EXPERTS[section.expert]}),
    )


def boundary_of(repository: Repository) -> float | None:
    """The model time that divides a repository's two experts; None where it has one model for all times."""
    boundary = repository.index.get("boundary_ratio")
    return None if boundary is None else float(boundary)


def objective_of(scheduler: Scheduler, section: FamilyObjectiveConfig) -> ObjectiveConfig:
    """The objective of a repository's scheduler. Raises UserError for a scheduler that is not known."""
    shared = {"weighting": section.weighting, "range": section.range, "guidance": section.guidance}
    name = str(scheduler.get("_class_name", ""))
    predicted = scheduler.get("prediction_type")
    if predicted in PREDICTIONS:
        if section.shift is not None:
            raise UserError(f"objective.shift goes with a flow, and {name} is of a denoising diffusion: leave it out")
        return DdpmConfig(
            kind="ddpm",
            steps=scheduler["num_train_timesteps"],
            schedule=_known(SCHEDULES, scheduler["beta_schedule"], name),
            beta_start=scheduler["beta_start"],
            beta_end=scheduler["beta_end"],
            prediction=_known(PREDICTIONS, predicted, name),
            zero_terminal_snr=bool(scheduler.get("rescale_betas_zero_snr", False)),
            snr_shift_scale=scheduler.get("snr_shift_scale", 1.0),
            **shared,
        )
    if name != "FlowMatchEulerDiscreteScheduler" and predicted != "flow_prediction":
        raise UserError(
            f"model.pretrained: no objective is known for the scheduler {name}: write the section `objective`"
        )
    shift: dict[str, Any] = {"shift": section.shift}
    if section.shift is None and scheduler.get("use_dynamic_shifting", False):
        shift = {"shift": "auto", "auto_shift": shift_by_tokens(scheduler)}
    elif section.shift is None:
        shift = {"shift": float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)}
    return FlowConfig(kind="flow", timesteps=section.timesteps, **shift, **shared)


def shift_by_tokens(scheduler: Mapping[str, Any]) -> ShiftConfig:
    """The dynamic shift of a scheduler's config, with the defaults of diffusers."""
    return ShiftConfig(
        rule=scheduler.get("time_shift_type", "exponential"),
        base_tokens=scheduler.get("base_image_seq_len", 256),
        base_shift=scheduler.get("base_shift", 0.5),
        max_tokens=scheduler.get("max_image_seq_len", 4096),
        max_shift=scheduler.get("max_shift", 1.15),
    )


def _known(names: dict[str, Any], name: str, scheduler: str) -> Any:
    if name not in names:
        raise UserError(
            f"model.pretrained: {scheduler} has {name!r}, for which no objective is known: write `objective`"
        )
    return names[name]
