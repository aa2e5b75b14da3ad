"""Flux.1, text to image.

Legend: B batch, C channels, T h w latent, N tokens of an image, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    UNLIMITED,
    Config,
    Family,
    FamilyCall,
    Latent,
    Sampling,
    SizeLimits,
    SmallClass,
    SmallSizes,
    check_sizes,
    even_sigmas,
    first_output,
    only_images,
    outputs_of,
    packed,
    pooled_of,
    token_grid,
    unpacked,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditions

NAME = "FluxTransformer2DModel"
PATCH: Latent = (1, 2, 2)  # the pipeline packs tokens; the class has patches of 1


@dataclass(frozen=True)
class FluxCall(FamilyCall):
    """The call of FluxTransformer2DModel, text to image: packed tokens with their places, times from 0 to 1, captions without a mask.

    guidance: the scale that is passed to a guidance-distilled model (`guidance_embeds`); the pipeline's own is 3.5.
    """

    guidance: float = 3.5

    def pooled_width(self, config: Config) -> int:
        return int(config["pooled_projection_dim"])

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        check_sizes(NAME, config, channels * math.prod(PATCH), text_width, "joint_attention_dim")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without pooled vectors, or with those of another width."""
        pooled_BD = pooled_of(NAME, conditions, self.pooled_width(config))
        _, h, w = token_grid(tuple(x_BCThw.shape[2:]), PATCH)
        text_BLD = conditions.text_BLD.to(x_BCThw.dtype)
        rows, columns = (torch.arange(size, device=x_BCThw.device) for size in (h, w))
        places_N3 = torch.stack(
            [torch.zeros(h, w, device=x_BCThw.device), *torch.meshgrid(rows, columns, indexing="ij")], dim=-1
        )
        arguments = {
            "hidden_states": packed(x_BCThw, PATCH),
            "timestep": TIMES * t_B / TIMES,  # rounded as the pipeline rounds it
            "encoder_hidden_states": text_BLD,
            "pooled_projections": pooled_BD.to(x_BCThw.dtype),
            "txt_ids": x_BCThw.new_zeros(text_BLD.shape[1], 3),
            "img_ids": places_N3.flatten(0, 1).to(x_BCThw.dtype),
            "return_dict": False,
        }
        if config["guidance_embeds"]:
            arguments["guidance"] = torch.full_like(t_B, self.guidance)
        return arguments

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return unpacked(first_output(output), x_BCThw, PATCH)

    def limits(self, config: Config) -> SizeLimits:
        """One frame."""
        return SizeLimits(most=(1, UNLIMITED, UNLIMITED))

    def tokens(self, config: Config, latent: Latent) -> int:
        """Tokens of the image; captions attend together with them. Raises ValueError for a video too."""
        only_images(latent)
        return super().tokens(config, latent)

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        s, times = n + l, linear(1, 256, e) + linear(1, e, e)
        conditions = times * (2 if config["guidance_embeds"] else 1) + linear(l, config["joint_attention_dim"], e)
        conditions += linear(1, config["pooled_projection_dim"], e) + linear(1, e, e)
        both = 2 * linear(1, e, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 8 * e)
        single = linear(1, e, 3 * e) + linear(s, e, 7 * e) + attention(s, s, e) + linear(s, 5 * e, e)
        ends = linear(n, config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, outputs_of(config))
        return conditions + config["num_layers"] * both + config["num_single_layers"] * single + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return PATCH


def _flux(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    channels = sizes.channels * math.prod(PATCH)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "joint_attention_dim": sizes.text_width,
        "pooled_projection_dim": sizes.text_width,
        "axes_dims_rope": (4, 4, 4),
    }


# the encoder runs over padding, and the transformer takes all of its rows
TEXT = TextRecipe(
    (EncoderRecipe(512, "text_encoder_2", "tokenizer_2", padded=True, stored="all"), EncoderRecipe(77, gives="pooled"))
)


SAMPLING = Sampling(
    steps=28, guidance=3.5, sigmas=even_sigmas, pack=partial(packed, patch=PATCH), unpack=partial(unpacked, patch=PATCH)
)

FAMILY = Family(
    "flux",
    NAME,
    FluxCall(),
    SmallClass(FluxCall.patch, 12, _flux),
    sampling=SAMPLING,
    text=TEXT,
    published=PUBLISHED["flux"],
)
