"""Shrink the task of a published video transformer for `check --parallel`: its class and heads, few narrow blocks, synthetic samples.

The process that checks loads the model once, for its class and its constructor's arguments; the others get these as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mmspeed.config import Config, RunConfig, video_config
from mmspeed.config.schema import ModelConfig, PublishedModelConfig
from mmspeed.config.sparse import SparseConfig
from mmspeed.config.tasks import referred
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import call_for, class_name, family_in, family_of, published_classes
from mmspeed.models.families.base import SmallClass, SmallSizes, token_grid
from mmspeed.models.families.complete import completed
from mmspeed.models.sections import bare, own_arguments
from mmspeed.pipelines.check.video import (
    CHANNELS,
    TEXT_WIDTH,
    ShrunkRun,
    SmallModel,
    known_strides,
    shrunk_samples,
    shrunk_size,
    small_config,
)
from mmspeed.pipelines.diffusion.experts import config_of_high, experts_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.sparsify import sparsify_model
from mmspeed.protocols import ModelCall
from mmspeed.protocols.calls import Configured

PLAIN = (str, int, float, bool, type(None))
# settings of sparse attention in a check: over a ring its plans differ from those of one process, unless it keeps all keys
ALL_KEPT: Mapping[str, Any] = {
    "rule": "threshold", "tau": 0.0, "error": None, "min_tokens": 1, "cluster_size": 8, "dense_first": 0, "dense_last": 0,
    "dense_steps": 0, "ramp_steps": 0,
}  # fmt: skip


@dataclass(frozen=True)
class PublishedModel:
    """The description of a published model from which a small one is made.

    Args:
        kind: its class, "module:class".
        config: the arguments of its constructor, without the records that diffusers keeps beside them.
        frozen: parameters that do not train.
        call: the call of its forward.
    """

    kind: str
    config: Mapping[str, Any]
    frozen: tuple[str, ...]
    call: ModelCall

    @classmethod
    def of(cls, model: nn.Module, call: ModelCall | None) -> PublishedModel:
        """The description of a loaded model. Raises UserError for one that a small model cannot represent."""
        kind = type(model)
        if class_name(model) not in published_classes() or not isinstance(model, Configured):
            known = ", ".join(published_classes())
            raise UserError(
                f"check --parallel makes small models of these published classes: {known}, not of {kind.__name__}. "
                "Give its task a `shrunk` of its own (mmspeed.protocols.CheckTask)"
            )
        reference = f"{kind.__module__}:{kind.__qualname__}"
        if "<locals>" in reference or kind.__module__ == "__main__":
            raise UserError(
                f"check --parallel: other processes cannot import {kind.__name__}, which {reference.partition(':')[0]} defines; put it at "
                "the top level of a module"
            )
        described = cls(
            reference,
            own_arguments(model.config),
            tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
            call or call_for(model),
        )
        _check_plain(model, described)
        return described

    @classmethod
    def of_repository(cls, repository: Repository, call: ModelCall | None) -> PublishedModel:
        """The description of a repository's transformer, from its config alone. Raises UserError for a class that no family has."""
        family, model = family_of(repository.class_name, repository.key), bare(repository)
        kind = type(model)
        assert isinstance(model, Configured)
        config = own_arguments(model.config)
        return cls(
            f"{kind.__module__}:{kind.__qualname__}",
            config,
            (),
            call or family.call_of(repository.index, repository.config),
        )

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> PublishedModel:
        """The model that `to_json` described."""
        call = referred(known["call"]["class"])(**known["call"]["fields"])
        return cls(known["class"], known["config"], tuple(known["frozen"]), call)

    def to_json(self) -> dict[str, Any]:
        """The same in types of JSON. Raises UserError for a call that is not a dataclass of plain values at a module's top level."""
        kind, call = type(self.call), self.call
        fields = asdict(call) if is_dataclass(call) and not isinstance(call, type) else None
        if fields is None or "<locals>" in kind.__qualname__ or not all(isinstance(v, PLAIN) for v in fields.values()):
            raise UserError(
                f"check --parallel: other processes cannot make the call {kind.__name__}; make it a dataclass of numbers and strings at "
                "the top level of a module"
            )
        return {
            "class": self.kind,
            "config": dict(self.config),
            "frozen": list(self.frozen),
            "call": {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields},
        }

    @property
    def small(self) -> SmallClass:
        """The rules for small models of its class."""
        family = family_in(referred(self.kind))
        assert family is not None  # `of` and `of_repository` have seen to it
        return family.small_class


@dataclass(frozen=True, kw_only=True)
class ShrunkPublished(ShrunkRun):
    """A small run of a published model."""

    published: PublishedModel

    @property
    def known(self) -> dict[str, Any]:
        """The codec's strides and the model's description: only one process loads them."""
        return {**super().known, "published": self.published.to_json()}

    @property
    def builder(self) -> str:
        """The name of the function that makes the same small run in another process."""
        return f"{__name__}:rebuild_published"

    def expected(self, kind: str) -> list[str]:
        """The exchanges that a step must make; over a ring sparse attention sends rows of the kept keys instead of all."""
        exchanges = super().expected(kind)
        if self.config.model.sparse is None:
            return exchanges
        return ["rows ring" if what == "ring ring" else what for what in exchanges if what != "ring ring_outer"]


def shrunk_published(config: Config, model: PublishedModel, known: Mapping[str, Any] | None = None) -> ShrunkPublished:
    """The small run of a published model at the layout of the config. `known`: facts from another process.

    Raises UserError for a bucket that fits neither codec nor model.
    """
    whole = completed(config)
    both, config = experts_of(whole), config_of_high(whole)
    strides, remarks = known_strides(config, known)
    if both is not None:
        remarks.append("one expert is compared: both are of one class and one layout")
    small, name = model.small, model.kind.rpartition(":")[2]
    patch = small.patch(model.config)
    samples = shrunk_samples(config, strides, patch, partial(token_grid, patch=patch))
    tensor = config.parallel.together(split=False)
    sizes = SmallSizes(
        CHANNELS,
        TEXT_WIDTH,
        samples.text_tokens,
        samples.latents[-1],
        lambda size, least: shrunk_size(size, tensor, least),
    )
    arguments, sparse = small.config(model.config, sizes), config.model.sparse
    if sparse is not None:
        if sparse.grouping in ("window", "skip"):
            sparse = None
            remarks.append("attention is dense in this check: over several processes these patterns differ")
        else:
            sparse = SparseConfig.model_validate({**sparse.model_dump(), **ALL_KEPT})
            remarks.append(
                "sparse attention keeps all keys in this check: over a ring its plans differ from those of one process"
            )
    section = ModelConfig(sparse=sparse)
    blocks = arguments["num_layers"] + arguments.get("num_single_layers", 0)
    words = f"{name}, {blocks} blocks, {arguments['num_attention_heads']} heads of width {small.head}"
    call = model.call
    call = small.call(call, samples.text_tokens)
    video = VideoDomain(config, build=_builder(model, arguments), call=call)
    about = SmallModel(words, patch, blocks, full=True)
    small_run = small_config(config, section, samples)
    return ShrunkPublished(
        video, small_run, strides, about, samples, ("; ".join(remarks),) if remarks else (), published=model
    )


def rebuild_published(config: RunConfig, known: Mapping[str, Any]) -> ShrunkPublished:
    """The small run that another process made of this config, from the facts that it knew."""
    return shrunk_published(video_config(config, "config"), PublishedModel.from_json(known["published"]), known)


def _builder(model: PublishedModel, arguments: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """A function that makes the small model, with arbitrary weights."""

    def build(section: ModelConfig | PublishedModelConfig, *_: Any) -> nn.Module:
        built: nn.Module = referred(model.kind)(**arguments)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(name not in model.frozen)
        if section.sparse is not None:
            sparsify_model(built, section.sparse)
        return built

    return build


def _check_plain(model: nn.Module, described: PublishedModel) -> None:
    """Raises UserError for a model that was changed after its construction: its config does not describe the change."""
    with torch.device("meta"):
        plain: nn.Module = referred(described.kind)(**described.config)
    other = dict(model.named_parameters()).keys() ^ dict(plain.named_parameters()).keys()
    if other:
        raise UserError(
            f"check --parallel makes a small {type(model).__name__} from its config, and this one was changed after it was made: "
            f"{min(other)} differs from the class's own"
        )
