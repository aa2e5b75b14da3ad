"""The settings of a decoder, from the section `model` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmspeed.config.language import LanguageModelConfig
from mmspeed.errors import UserError
from mmspeed.models.language.config import DecoderSettings, ExpertSettings


def changed(settings: DecoderSettings, section: LanguageModelConfig, rows: int) -> DecoderSettings:
    """The settings of a shape with the config's changes. rows: of the embedding. Raises UserError where they do not go together."""
    depth = section.num_hidden_layers or settings.num_hidden_layers
    windows = section.windows_of(depth)
    settings = replace(
        settings,
        vocab_size=rows,
        windows=settings.windows[:depth] if windows is None else windows,
        **section.changes,
    )
    if section.experts:
        settings = replace(settings, experts=experts_of(settings, section.experts))
    if settings.experts is not None and all(block in settings.experts.dense for block in range(depth)):
        raise UserError(f"all {depth} blocks have an MLP and none has experts: lower first_k_dense_replace")
    return settings


def experts_of(settings: DecoderSettings, keys: Mapping[str, Any]) -> ExpertSettings:
    """The shape's experts with the config's keys; for a shape without, with defaults. Raises UserError for keys of experts without any."""
    values = dict(keys)
    if "num_experts_per_tok" in values:
        values["top_k"] = values.pop("num_experts_per_tok")
    if "first_k_dense_replace" in values:
        values["dense"] = tuple(range(values.pop("first_k_dense_replace")))
    base = settings.experts
    if base is not None:
        return replace(base, **values)
    if "num_experts" not in keys:
        raise UserError(f"{next(iter(keys))} is of experts, and the model has none: set num_experts, or leave it out")
    top_k = values.setdefault("top_k", 2)
    values.setdefault("moe_intermediate_size", max(1, settings.intermediate_size // top_k))
    return ExpertSettings(**{"norm_topk_prob": True, **values})
