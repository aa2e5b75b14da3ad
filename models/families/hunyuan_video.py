"""HunyuanVideo, text to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    Config,
    Family,
    FamilyCall,
    Latent,
    Published,
    Sampling,
    SmallClass,
    SmallSizes,
    check_sizes,
    outputs_of,
    pooled_of,
    sigmas_to_zero,
    small_channels,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditions


@dataclass(frozen=True)
class HunyuanVideoCall(FamilyCall):
    """The call of HunyuanVideoTransformer3DModel, text to video.

    guidance: the scale that is passed to a guidance-distilled model (`guidance_embeds`); the pipeline's own is 6.
    """

    guidance: float = 6.0

    def pooled_width(self, config: Config) -> int:
        return int(config["pooled_projection_dim"])

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for an image-to-video model and for sizes that differ."""
        check_sizes("HunyuanVideoTransformer3DModel", config, channels, text_width, "text_embed_dim")
        if config["image_condition_type"] is not None:
            raise UserError(
                f"HunyuanVideoTransformer3DModel: image_condition_type is {config['image_condition_type']}: image-to-video models "
                "cannot be trained yet"
            )

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without pooled vectors, or with those of another width."""
        pooled_BD = pooled_of("HunyuanVideoTransformer3DModel", conditions, self.pooled_width(config))
        arguments = {
            "hidden_states": x_BCThw,
            "timestep": TIMES * t_B,
            "encoder_hidden_states": conditions.text_BLD.to(x_BCThw.dtype),
            "encoder_attention_mask": conditions.text_mask_BL,
            "pooled_projections": pooled_BD.to(x_BCThw.dtype),
            "return_dict": False,
        }
        if config["guidance_embeds"]:
            arguments["guidance"] = torch.full_like(t_B, TIMES * self.guidance)
        return arguments

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        s, hidden, patch = n + l, int(config["mlp_ratio"] * e), math.prod(self.patch(config))
        times = linear(1, 256, e) + linear(1, e, e)
        conditions = times * (2 if config["guidance_embeds"] else 1)
        conditions += linear(1, config["pooled_projection_dim"], e) + linear(1, e, e)
        text = config["text_embed_dim"]
        refiner = times + linear(1, text, e) + linear(1, e, e) + linear(l, text, e)
        refined = linear(l, e, 4 * e) + attention(l, l, e) + linear(1, e, 2 * e) + linear(l, e, 8 * e)
        both = 2 * linear(1, e, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 2 * hidden)
        single = linear(1, e, 3 * e) + linear(s, e, 3 * e) + attention(s, s, e) + linear(s, e, hidden)
        single += linear(s, e + hidden, e)
        ends = (
            linear(n, patch * config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, patch * outputs_of(config))
        )
        blocks = config["num_refiner_layers"] * refined + config["num_layers"] * both
        return conditions + refiner + blocks + config["num_single_layers"] * single + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


def _hunyuan_video(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **small_channels(config, sizes.channels),
        "text_embed_dim": sizes.text_width,
        "pooled_projection_dim": sizes.text_width,
        "rope_axes_dim": (4, 4, 4),
    }


TEMPLATE = "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video:DEFAULT_PROMPT_TEMPLATE"
TEXT = TextRecipe(
    (
        EncoderRecipe(256, layer=-3, template=TEMPLATE),
        EncoderRecipe(77, "text_encoder_2", "tokenizer_2", "pooled"),
    )
)
SAMPLING = Sampling(steps=50, guidance=6.0, sigmas=sigmas_to_zero)
PUBLISHED = {
    "hunyuan-video": Published("hunyuanvideo-community/HunyuanVideo", 129, 720, 1280, 24.0, (4, 16)),
}

FAMILY = Family(
    "hunyuan-video",
    "HunyuanVideoTransformer3DModel",
    HunyuanVideoCall(),
    SmallClass(HunyuanVideoCall.patch, 12, _hunyuan_video),
    sampling=SAMPLING,
    text=TEXT,
    published=PUBLISHED,
)
