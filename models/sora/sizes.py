"""Named sizes of SoraDiT, and the construction of a model from a config section."""

from __future__ import annotations

from typing import Any

import torch

from mmspeed.config.schema import ModelConfig
from mmspeed.errors import UserError, nearest
from mmspeed.initialize import init_weights
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig, on_meta

# "S/2" and the like are named as in DiT: the size and the spatial patch. Fused attention takes heads of 64 or 128 as they are and pads
# XL/2's of 72 to 128; XL/2-128 has as many parameters in heads of 128, which split over 2, 4 or 8 devices.
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"width": 64, "depth": 2, "heads": 4, "adaln_rank": 8},
    "tiny": {"width": 192, "depth": 6, "heads": 6, "adaln_rank": 16},
    "S/2": {"width": 384, "depth": 12, "heads": 6, "adaln_rank": 64},
    "B/2": {"width": 768, "depth": 12, "heads": 12, "adaln_rank": 128},
    "L/2": {"width": 1024, "depth": 24, "heads": 16, "adaln_rank": 256},
    "XL/2": {"width": 1152, "depth": 28, "heads": 16, "adaln_rank": 256},
    "XL/2-128": {"width": 1024, "depth": 35, "heads": 8, "adaln_rank": 256},
    "3B": {"width": 2048, "depth": 42, "heads": 16, "adaln_rank": 256},
    "8B": {"width": 4096, "depth": 28, "heads": 32, "adaln_rank": 256},
}


def resolve_config(model_cfg: ModelConfig, latent_channels: int, text_width: int) -> SoraDiTConfig:
    """The named size with the section's own fields over it. Raises UserError for an unknown size or a misfit."""
    if model_cfg.size not in SIZES:
        raise UserError(
            f"model.size {model_cfg.size!r} is not a known size{nearest(model_cfg.size, list(SIZES))} "
            f"(known: {', '.join(SIZES)})"
        )
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
