"""Models of config sections of either kind: SoraDiT by its sizes, or a published class from its repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from mmspeed.config.known_models import videos_of
from mmspeed.config.schema import Config, ModelConfig, PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.models.adapters import adapt
from mmspeed.models.diffusers.loading import empty_model, stored_model
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.diffusers.sparse import grid_of, sparse_plan
from mmspeed.models.diffusers.sparsified import sparsify
from mmspeed.models.families import Family, FamilyCall, SizeLimits, call_for, family_in, family_of
from mmspeed.models.sora.sizes import build_model, resolve_config
from mmspeed.protocols import ModelCall
from mmspeed.protocols.calls import Conditioning, Configured, TakesConditioning
from mmspeed.shapes import Bucket

AnySection = ModelConfig | PublishedModelConfig
Latent = tuple[int, int, int]
KEY = "model.pretrained"
FAR = 4  # times as many pixels as a model was trained for, or as few


@dataclass(frozen=True)
class FamilyCounts:
    """Tokens and operations of a class, by its call. `config`: the arguments that the model was made with."""

    call: ModelCall
    config: Mapping[str, Any]

    def tokens(self, latent: Latent) -> int:
        return self.call.tokens(self.config, latent)

    def flops(self, latent: Latent, text_tokens: int) -> int:
        return self.call.flops(self.config, latent, text_tokens)


def repository_of(section: PublishedModelConfig, opened: Repository | None = None) -> Repository:
    """The repository of a model; of a hub id the hub is asked, unless it is `opened` before, perhaps for another of its transformers.

    Raises UserError for one that cannot be reached, or that holds no transformer.
    """
    if opened is not None and (opened.pretrained, opened.revision) == (section.pretrained, section.revision):
        repository = replace(opened.of(section.subfolder), file=None)
    else:
        repository = Repository.open(section.pretrained, section.revision, KEY, section.subfolder)
    return repository if section.weights is None else repository.with_file(Path(section.weights), "model.weights")


def opened_of(section: AnySection) -> Repository | None:
    """`repository_of`, to be handed on as `opened`; None for SoraDiT, which has none."""
    return repository_of(section) if isinstance(section, PublishedModelConfig) else None


def family_of_section(section: PublishedModelConfig, opened: Repository | None = None) -> Family:
    """The family of a model, by its repository. Raises UserError for a class that no family has."""
    return family_of(repository_of(section, opened).class_name, KEY)


def call_of(section: AnySection, opened: Repository | None = None) -> ModelCall | None:
    """The call that a published model's repository asks for; None for SoraDiT, whose class has one."""
    if isinstance(section, ModelConfig):
        return None
    repository = repository_of(section, opened)
    return family_of(repository.class_name, KEY).call_of(repository.index, repository.config)


def outline(section: AnySection, channels: int, text_width: int, opened: Repository | None = None) -> nn.Module:
    """The model on the meta device: its class, plan and shapes, without weights."""
    if isinstance(section, ModelConfig):
        return build_model(section, channels, text_width, device="meta")
    return _prepared(bare(repository_of(section, opened)), section)


def with_weights(
    section: AnySection, channels: int, text_width: int, device: str, opened: Repository | None = None
) -> nn.Module:
    """The model to train: SoraDiT on a device, a published one without memory, with the files of its weights."""
    if isinstance(section, ModelConfig):
        return build_model(section, channels, text_width, device=device)
    repository = repository_of(section, opened)
    return _prepared(stored_model(repository, class_of(repository)), section)


def stored_conditions(config: Config) -> tuple[str, ...]:
    """Names of the latents of conditioning frames that the config's model needs beside a clip's own (`Conditioning.stored`).

    Raises UserError for a model that cannot be reached.
    """
    if isinstance(config.model, ModelConfig) or not config.conditioning.gives_frames:
        return ()
    return conditioning_of(config.model, repository_of(config.model)).stored(config.conditioning.shares)


def conditioning_of(section: PublishedModelConfig, repository: Repository) -> Conditioning:
    """What a published model is given beside captions, by its repository."""
    call = call_of(section, repository)
    if not isinstance(call, TakesConditioning):
        return Conditioning()
    return call.conditioning(repository.config(repository.transformer))


def class_of(repository: Repository) -> Any:
    """The class of diffusers that a repository's transformer is of. Raises UserError for one that no family has."""
    import diffusers

    return getattr(diffusers, family_of(repository.class_name, KEY).transformer)


def bare(repository: Repository) -> nn.Module:
    """The repository's transformer without memory, from its settings alone."""
    return empty_model(class_of(repository), repository.config(repository.transformer))


def _prepared(model: nn.Module, section: PublishedModelConfig) -> nn.Module:
    """The published model with its plan, sparse and under adapters where the section asks for it; the control of thresholds is the loop's."""
    declare_known_plan(model)
    if section.sparse is not None:
        sparsify(model, sparse_plan(model, None), grid_of(model), section.sparse)
    family = family_in(type(model))
    names = [name for name, _ in model.named_parameters()]
    return adapt(model, section.adapter, section.base, family.always_unused(names) if family is not None else ())


def counts_of(section: AnySection, model: nn.Module, opened: Repository | None = None) -> FamilyCounts:
    """The counts of tokens and operations of a section's model."""
    return FamilyCounts(call_of(section, opened) or call_for(model), arguments_of(model))


def arguments_of(model: nn.Module) -> dict[str, Any]:
    """The arguments that a model was made with, by name: those of its `config`; none where it has none."""
    config = getattr(model, "config", None)
    if is_dataclass(config) and not isinstance(config, type):
        return {each.name: getattr(config, each.name) for each in fields(config)}
    return dict(config) if isinstance(config, Mapping) else {}


def own_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a `config` of diffusers, without the records that it keeps beside them."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def patch_of(section: AnySection) -> Latent:
    """The model's patch along time, height and width, in latent positions."""
    if isinstance(section, ModelConfig):
        return resolve_config(section, 1, 1).patch
    repository = repository_of(section)
    return family_of(repository.class_name, KEY).small_class.patch(repository.config(repository.transformer))


def limits_of(section: AnySection) -> SizeLimits:
    """The latents that the model takes beyond multiples of its patch."""
    if isinstance(section, ModelConfig):
        return SizeLimits()
    repository = repository_of(section)
    call = call_of(section, repository)
    return call.limits(repository.config(repository.transformer)) if isinstance(call, FamilyCall) else SizeLimits()


def size_of(section: AnySection) -> str:
    """A model's size in a word: `tiny`, or the repository's name."""
    return section.size if isinstance(section, ModelConfig) else section.pretrained


def words_of(section: AnySection) -> str:
    """A model in a few words: `tiny, factorised`, or the repository's name."""
    return f"{section.size}, {section.arrangement}" if isinstance(section, ModelConfig) else section.pretrained


def check_inputs(
    section: AnySection, model: nn.Module, channels: int, text_width: int, opened: Repository | None = None
) -> None:
    """Raises UserError for a published model that takes other latents or captions than these."""
    call = call_of(section, opened)
    if call is not None:
        assert isinstance(model, Configured)
        call.check(dict(model.config), channels, text_width)


def size_warnings(section: AnySection, buckets: Iterable[Bucket]) -> list[str]:
    """Lines on buckets far from the videos that a published model was trained for; none where these are not known."""
    videos = None if isinstance(section, ModelConfig) else videos_of(section.pretrained)[1]
    if videos is None:
        return []
    lines, own = [], videos.height * videos.width
    for bucket in buckets:
        share = bucket.height * bucket.width / own
        if not 1 / FAR <= share <= FAR:
            lines.append(
                f"bucket {bucket} has {share:.2g} times the pixels of the {videos.height}x{videos.width} that the model was trained for: "
                "its first samples will be poor, until it has learnt the size"
            )
        elif videos.fixed and bucket.frames != videos.frames:
            lines.append(
                f"bucket {bucket} has other frames than the {videos.frames} whose positions the model has learnt: the class computes "
                "others for it"
            )
        elif bucket.frames > FAR * videos.frames:
            lines.append(
                f"bucket {bucket} has more than {FAR} times the {videos.frames} frames that the model was trained for"
            )
    return lines


def sora_section(config: Config, command: str) -> ModelConfig:
    """The section of SoraDiT, for a `command` that is for it alone. Raises UserError for a published model."""
    if isinstance(config.model, ModelConfig):
        return config.model
    raise UserError(f"{command} is for models of kind sora; model.kind is {config.model.kind}")
