"""The settings of a decoder, from the section `model` of a config."""

from __future__ import annotations

from dataclasses import replace

from mmspeed.config.language import ExpertsConfig, LanguageModelConfig
from mmspeed.errors import UserError
from mmspeed.models.language.config import DecoderSettings, ExpertSettings

OWN_NAMES = {"per_token": "chosen", "first_dense": "dense"}  # keys of the config, by names of ExpertSettings


def changed(settings: DecoderSettings, section: LanguageModelConfig, rows: int) -> DecoderSettings:
    """The settings of a shape with the config's changes. rows: of the embedding. Raises UserError where they do not go together."""
    depth = section.depth or settings.depth
    windows = section.windows_of(depth)
    settings = replace(
        settings,
        vocabulary=rows,
        windows=settings.windows[:depth] if windows is None else windows,
        **section.changes,
    )
    if section.experts is not None:
        settings = replace(settings, experts=experts_of(settings, section.experts))
    if settings.experts is not None and all(block in settings.experts.dense for block in range(settings.depth)):
        raise UserError(f"all {settings.depth} blocks have an MLP and none has experts: lower experts.first_dense")
    return settings


def experts_of(settings: DecoderSettings, section: ExpertsConfig) -> ExpertSettings:
    """The shape's experts with the config's changes; for a shape without, the section's own defaults."""
    values = section.model_dump(exclude_none=True)
    if "first_dense" in values:
        values["first_dense"] = tuple(range(values["first_dense"]))
    values = {OWN_NAMES.get(name, name): value for name, value in values.items()}
    base = settings.experts
    if base is None:
        chosen = values.setdefault("chosen", 2)
        values.setdefault("width", max(1, settings.hidden // chosen))
        return ExpertSettings(**{"count": 8, "normalised": True, **values})
    return replace(base, **values)
