"""A small run of a published video transformer: its class and heads, few narrow blocks, in a folder with weights by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmspeed.config import Config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import INDEX, Repository
from mmspeed.models.families import Family, class_name, family_in, family_of, published_classes
from mmspeed.models.families.base import OWN_CALL, SmallSizes, token_grid
from mmspeed.models.families.complete import completed
from mmspeed.models.sections import bare, own_arguments
from mmspeed.models.weights import quiet
from mmspeed.pipelines.diffusion.experts import config_of_high, experts_of
from mmspeed.pipelines.domains.small import shrunk_size, small_adapter, small_base, value_off_start
from mmspeed.pipelines.domains.video.small import (
    CHANNELS,
    TEXT_WIDTH,
    known_strides,
    sizes_of,
    small_samples,
    written,
)
from mmspeed.protocols import ModelCall, SmallRun
from mmspeed.protocols.calls import Configured

# settings of sparse attention in a check: over a ring its plans differ from those of one process, unless it keeps all keys
ALL_KEPT: Mapping[str, Any] = {
    "rule": "threshold", "tau": 0.0, "error": None, "min_tokens": 1, "cluster_size": 8, "dense_first": 0, "dense_last": 0,
    "dense_steps": 0, "ramp_steps": 0,
}  # fmt: skip


@dataclass(frozen=True)
class PublishedModel:
    """The description of a published model from which a small one is made.

    Args:
        config: the arguments of its constructor, without the records that diffusers keeps beside them.
        call: the call of its forward.
        remarks: what of it a small one does not have.
    """

    family: Family
    config: Mapping[str, Any]
    call: ModelCall
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, call: ModelCall | None) -> PublishedModel:
        """The description of a loaded model. Raises UserError for one that a small model cannot represent."""
        family, name = family_in(type(model)), type(model).__name__
        if family is None or class_name(model) not in published_classes() or not isinstance(model, Configured):
            known = ", ".join(published_classes())
            raise UserError(
                f"check --parallel makes small models of these published classes: {known}, not of {name}. "
                "Give its task a `small` of its own (mmspeed.protocols.SmallRun)"
            )
        described = cls(family, own_arguments(model.config), call or family.call)
        if type(described.call) is not type(family.call):
            raise UserError(
                f"check --parallel: other processes call {name} as its family does, not by {type(call).__name__}"
            )
        with torch.device("meta"):
            plain = described.build(described.config)
        other = dict(model.named_parameters()).keys() ^ dict(plain.named_parameters()).keys()
        if other or type(model) is not type(plain):
            difference = f"{min(other)} differs from the class's own" if other else f"it is no {family.transformer}"
            raise UserError(
                f"check --parallel makes a small {name} from its config, and this one was changed after it was made: {difference}"
            )
        if all(parameter.requires_grad for parameter in model.parameters()):
            return described
        return replace(described, remarks=("weights that are frozen in training have gradients here",))

    @classmethod
    def of_repository(cls, repository: Repository, call: ModelCall | None) -> PublishedModel:
        """The description of a repository's transformer, from its config alone. Raises UserError for a class that no family has."""
        family, model = family_of(repository.class_name, repository.key), bare(repository)
        assert isinstance(model, Configured)
        call = call or family.call_of(repository.index, repository.config)
        return cls(family, own_arguments(model.config), call)

    def build(self, arguments: Mapping[str, Any]) -> nn.Module:
        """A model of its class."""
        import diffusers

        model: nn.Module = getattr(diffusers, self.family.transformer)(**arguments)
        return model

    def write(self, folder: Path, arguments: Mapping[str, Any], call: ModelCall, seed: int) -> None:
        """Write a repository of such a model, with weights by seed."""
        model: Any = self.build(arguments)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(value_off_start(name, parameter.shape, seed))
        with quiet():
            model.save_pretrained(folder / "transformer")
        fields: dict[str, Any] = asdict(call) if is_dataclass(call) and not isinstance(call, type) else {}
        (folder / INDEX).write_text(json.dumps({OWN_CALL: fields}), encoding="utf-8")


def small_published(config: Config, model: PublishedModel, folder: Path) -> SmallRun:
    """The small run of a published model at the layout of the config. Raises UserError for a bucket that fits neither codec nor model."""
    whole = completed(config)
    both, config = experts_of(whole), config_of_high(whole)
    strides, remarks = known_strides(config)
    remarks += model.remarks
    if both is not None:
        remarks.append("one expert is compared: both are of one class and one layout")
    small = model.family.small_class
    patch, tensor = small.patch(model.config), config.parallel.together(split=False)
    samples = small_samples(config, strides, patch, partial(token_grid, patch=patch))
    sizes = SmallSizes(
        CHANNELS,
        TEXT_WIDTH,
        samples.text_tokens,
        samples.latent,
        lambda size, least: shrunk_size(size, tensor, least),
    )
    arguments, sparse = small.config(model.config, sizes), config.model.sparse
    if sparse is not None and sparse.grouping in ("window", "skip"):
        sparse = None
        remarks.append("attention is dense in this check: over several processes these patterns differ")
    elif sparse is not None:
        sparse = SparseConfig.model_validate({**sparse.model_dump(), **ALL_KEPT})
        remarks.append(
            "sparse attention keeps all keys in this check: over a ring its plans differ from those of one process"
        )
    model.write(folder / "model", arguments, small.call(model.call, samples.text_tokens), config.seed)
    own = config.model
    under = (
        {"adapter": small_adapter(own.adapter), "base": small_base(own.base)}
        if isinstance(own, PublishedModelConfig)
        else {}
    )
    section = PublishedModelConfig(kind="diffusers", pretrained=str(folder / "model"), sparse=sparse, **under)
    blocks = arguments["num_layers"] + arguments.get("num_single_layers", 0)
    words = (
        f"{model.family.transformer}, {blocks} blocks, {arguments['num_attention_heads']} heads of width {small.head}"
    )
    return written(config, folder, section, samples, f"{words}, patch {sizes_of(patch)}", remarks)
