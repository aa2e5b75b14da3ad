"""The settings of a decoder, from a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmspeed.config.language import LanguageConfig, LanguageModelConfig
from mmspeed.errors import UserError
from mmspeed.models.language.config import DecoderSettings, ExpertSettings
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.shapes import shape_named, tiny_twin
from mmspeed.models.language.weights import stored_decoder

TINY = "tiny-"
ROWS = 64  # an embedding has a multiple of these


def configured(config: LanguageConfig, vocabulary: int | None) -> tuple[DecoderSettings, Decoder | None]:
    """The settings for a tokenizer of so many ids, None: the shape's own; and the model of a folder that was opened for them.

    Raises UserError for an unknown shape, and for sizes that do not go together.
    """
    section, spare = config.model, None
    if section.pretrained is not None:
        spare = stored_decoder(section.pretrained, section.revision, section.num_nextn_predict_layers)
        settings = spare.settings
    else:
        name = section.shape
        settings = shape_named(name.removeprefix(TINY)).settings
        if name.startswith(TINY):
            settings = tiny_twin(settings)
        rows = section.vocab_size or (settings.vocab_size if vocabulary is None else -(-vocabulary // ROWS) * ROWS)
        try:
            settings = changed(settings, section, rows)
        except UserError as error:
            raise UserError(f"model: {error}") from None
    if section.balance is not None and settings.experts is None:
        raise UserError(f"model.balance: {section.balance} is of experts, and the model has none: leave it out")
    if settings.experts is not None:
        balance, rate = section.balance or settings.experts.balance, config.objective.balance_rate
        settings = replace(settings, experts=replace(settings.experts, balance=balance, balance_rate=rate))
    return settings, spare


def changed(settings: DecoderSettings, section: LanguageModelConfig, rows: int) -> DecoderSettings:
    """The settings of a shape with the config's changes. rows: of the embedding. Raises UserError where they do not go together."""
    depth = section.num_hidden_layers or settings.num_hidden_layers
    windows = section.windows_of(depth)
    settings = replace(
        settings, vocab_size=rows, windows=settings.windows[:depth] if windows is None else windows, **section.changes
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
