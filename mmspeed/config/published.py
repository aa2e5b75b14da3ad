"""Config sections of published models of diffusers, and the sections that follow from the repository a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from .adapters import AdapterConfig, BaseConfig
from .inputs import Section
from .shift import checked_range, checked_shift
from .sparse import SparseConfig
from .training import Weighting, WeightingSection

DEFAULT_KINDS: Mapping[str, str] = {"vae": "linear", "text": "minilm", "objective": "flow", "model": "sora"}
REPOSITORY_KINDS: Mapping[str, str] = {"vae": "diffusers", "text": "family", "objective": "family"}
REPOSITORY = "diffusers"  # the kind of a model whose other parts are in its repository, too


class PublishedModelConfig(Section):
    """A video transformer of diffusers, from its repository. Codec, text encoders, objective and sampler come from there, too."""

    kind: Literal["diffusers"] = Field(description="A published model of diffusers.")
    pretrained: str = Field(
        description="Hub id (`owner/name`) or folder of the repository: the folder that holds `model_index.json`."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the hub id.")
    subfolder: str = Field("transformer", description="Folder inside `pretrained` that holds the transformer.")
    second_subfolder: str | None = Field(
        None,
        description="Folder inside `pretrained` of a second transformer that is trained, too, for times below `objective.boundary`.",
    )
    weights: str | None = Field(
        None,
        description="A `.safetensors` file with other weights of the transformer, in the names of diffusers or of the model's authors.",
    )
    sparse: SparseConfig | None = Field(None, description="Sparse self-attention; null: all attention is dense.")
    unrecorded = ("adapter", "base")
    adapter: AdapterConfig | None = Field(
        None, description="Adapters that train while the model stays frozen; null: all its weights train."
    )
    base: BaseConfig = Field(default_factory=BaseConfig, description="The frozen weights beside adapters.")


class FamilyObjectiveConfig(WeightingSection):
    """The objective that a published model was trained with, from its repository's scheduler."""

    samplers: ClassVar[tuple[str, ...]] = ("family", "euler", "heun", "ddim", "unipc", "dpm++")

    kind: Literal["family"] = Field(description="The objective of the model's own repository.")
    weighting: Weighting = Field(
        "sample", description="What counts alike in the gradients of an epoch, as in the other kinds."
    )
    timesteps: Literal["uniform", "logit_normal"] = Field(
        "logit_normal", description="Distribution of training times before the shift, of models of a flow."
    )
    shift: float | Literal["auto"] | dict[str, float] | None = Field(
        None, description="Timestep shift in training, as in kind flow; null: that of the repository's scheduler."
    )
    guidance: float | None = Field(
        None, ge=0, description="Scale that a guidance-distilled model is given in training; null: its pipeline's own."
    )
    range: tuple[float, float] | None = Field(
        None, description="Lowest and highest model time that is trained, from 0 (data) to 1 (noise); null: all."
    )
    expert: Literal["high", "low"] | None = Field(
        None,
        description="Expert of a model with two, of `high` noise or of `low` noise: sets `range` and `model.subfolder` by the repository.",
    )

    experts: Literal["both"] | None = Field(
        None,
        description="`both`: a step trains one of a model's two experts; sets `boundary` and `model.second_subfolder` by the repository.",
    )
    high_share: float = Field(
        0.5, gt=0, lt=1, description="With `experts: both`, the share of steps that train the expert of high noise."
    )

    _shift = field_validator("shift", mode="before")(lambda value: value if value is None else checked_shift(value))
    _range = field_validator("range")(checked_range)

    @model_validator(mode="after")
    def _one_range(self) -> FamilyObjectiveConfig:
        if self.expert is not None and self.range is not None:
            raise ValueError("expert sets the range of times itself: leave range out")
        if self.experts is not None and (self.expert is not None or self.range is not None):
            raise ValueError("experts: both trains all times, by two experts: leave expert and range out")
        return self


def default_kind(section: str, tree: Mapping[str, Any]) -> str:
    """The kind of a section that names none, in a config of nested mappings: it depends on the kind of the model."""
    kinds = {**DEFAULT_KINDS, **(REPOSITORY_KINDS if has_repository(tree) else {})}
    return kinds[section]


def has_repository(tree: Mapping[str, Any]) -> bool:
    """True for a config whose model comes from a repository."""
    model = tree.get("model")
    return isinstance(model, Mapping) and model.get("kind") == REPOSITORY


def with_repository(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the codec, text encoders and objective of the model's repository, where it names no others."""
    model = tree.get("model")
    if isinstance(model, Mapping) and "kind" not in model:
        return {**tree, "model": {"kind": DEFAULT_KINDS["model"], **model}}
    if not has_repository(tree):
        return tree
    model = tree["model"]
    place = {name: model[name] for name in ("pretrained", "revision") if name in model}
    usual: dict[str, dict[str, Any]] = {
        "vae": {"kind": "diffusers", "subfolder": "vae", **place},
        "text": {"kind": "family", **place},
        "objective": {"kind": "family"},
    }
    changes = {}
    for section, values in usual.items():
        own = tree.get(section, {})
        if not isinstance(own, Mapping) or own.get("kind", values["kind"]) != values["kind"]:
            continue
        # another repository's folders are its own
        changes[section] = {"kind": values["kind"], **own} if "pretrained" in own else {**values, **own}
    return {**tree, **changes}
