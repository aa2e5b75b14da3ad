"""Named sizes of SoraDiT, and the construction of a model from a config section."""

from __future__ import annotations

import torch

from mmspeed.config.model import SIZES
from mmspeed.config.schema import ModelConfig
from mmspeed.initialize import init_weights
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig, on_meta


def resolve_config(model_cfg: ModelConfig, latent_channels: int, text_width: int) -> SoraDiTConfig:
    """The named size with the section's own fields over it. Raises UserError for a misfit."""
    section = {name: getattr(model_cfg, name) for name in type(model_cfg).model_fields if name not in ("kind", "size")}
    overrides = {name: value for name, value in section.items() if value is not None}
    fields = {**SIZES[model_cfg.size], **overrides}
    return SoraDiTConfig(latent_channels=latent_channels, text_width=text_width, **fields)


def build_model(
    model_cfg: ModelConfig,
    latent_channels: int,
    text_width: int,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> SoraDiT:
    """The model of a config section on `device` (CPU by default), with the initial weights of `seed`.

    On "meta" it has no weights yet: shard it if wanted, then `to_empty(device=...)` and `mmspeed.initialize.init_weights`. Raises
    UserError as `resolve_config`.
    """
    model = on_meta(resolve_config(model_cfg, latent_channels, text_width))
    target = torch.device(device or "cpu")
    if target.type != "meta":
        model.to_empty(device=target)
        init_weights(model, seed)
    return model
