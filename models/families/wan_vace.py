"""Wan 2.1 VACE: text to video under a control video, whose latents a second row of blocks reads.

Legend: B batch, C channels, T h w latent, N tokens of a video, E model width, M channels of the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import linear
from mmspeed.models.families.base import (
    MOST_BLOCKS,
    Config,
    Family,
    Latent,
    SmallClass,
    SmallSizes,
    check_sizes,
    width_of,
)
from mmspeed.models.families.wan import SAMPLING, TEXT, WanCall, shortened, small_wan
from mmspeed.protocols.calls import BLANK, Conditioning, Conditions

NAME = "WanVACETransformer3DModel"


@dataclass(frozen=True)
class WanVACECall(WanCall):
    """The call of WanVACETransformer3DModel: that of Wan, with a control of which all is to be made anew."""

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ, for channels of a control without a mask, and for an image encoder's embeddings."""
        check_sizes(NAME, config, channels, text_width, "text_dim")
        if mask_channels(config) < 1 or config["image_dim"] is not None:
            raise UserError(
                f"{NAME} has vace_in_channels {config['vace_in_channels']} and image_dim {config['image_dim']}: known models take a grey "
                f"video, a control (2 x {channels} channels) and a mask, and no image encoder's embedding"
            )

    def conditioning(self, config: Config) -> Conditioning:
        """No frames, and always a control beside a grey video."""
        return Conditioning(roles=("control", BLANK))

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without a control, and as Wan's."""
        blank_BCThw, control_BCThw = (conditions.latents_of(role).to(x_BCThw) for role in (BLANK, "control"))
        mask_BMThw = x_BCThw.new_ones(len(x_BCThw), mask_channels(config), *x_BCThw.shape[2:])
        return {
            **super().call(config, x_BCThw, t_B, conditions),
            "control_hidden_states": torch.cat((blank_BCThw, control_BCThw, mask_BMThw), dim=1),
            "control_hidden_states_scale": x_BCThw.new_ones(len(config["vace_layers"])),
        }

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, e, blocks = self.tokens(config, latent), width_of(config), len(config["vace_layers"])
        embedding = linear(n, math.prod(self.patch(config)) * config["vace_in_channels"], e)
        control = embedding + blocks * self.block_flops(config, n) + linear(n, e, (blocks + 1) * e)
        return super().flops(config, latent, text_tokens) + control


def mask_channels(config: Config) -> int:
    """Channels of the mask: the pixels of a latent position."""
    return int(config["vace_in_channels"] - 2 * config["in_channels"])


def _small(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    layers = range(min(len(config["vace_layers"]), config["num_layers"], MOST_BLOCKS))
    control = {"vace_in_channels": 2 * sizes.channels + mask_channels(config), "vace_layers": list(layers)}
    return {**small_wan(config, sizes, width), **control}


FAMILY = Family(
    "wan_vace",
    NAME,
    WanVACECall(),
    SmallClass(WanVACECall.patch, 12, _small, shortened),
    sampling=SAMPLING,
    text=TEXT,
    control="video",
    published=PUBLISHED["wan_vace"],
)
