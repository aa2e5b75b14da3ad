"""HunyuanVideo, text to video and image to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    Config,
    Family,
    FamilyCall,
    Index,
    Latent,
    Parts,
    Sampling,
    SmallClass,
    SmallSizes,
    channels_of_frames,
    check_sizes,
    outputs_of,
    pooled_of,
    sigmas_to_zero,
    small_channels,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, PictureUse, TextRecipe
from mmspeed.protocols.calls import Conditioning, Conditions, ModelCall

NAME = "HunyuanVideoTransformer3DModel"
FROM_IMAGES = "HunyuanVideoImageToVideoPipeline"
CHANNELS = "latent_concat"
BLEND = 1e-3  # share of the image in the pipeline's first noise
GUIDANCE_FROM_IMAGES = 1.0  # the default of the pipeline
LOST_FRAMES = 4  # of a video of a model that takes channels, which the pipeline cuts off in front


@dataclass(frozen=True)
class HunyuanVideoCall(FamilyCall):
    """The call of HunyuanVideoTransformer3DModel.

    A model from images has `image_condition_type`: with `latent_concat` its further channels are the latent of the first frame, with zeros
    after it, and a mask; with `token_replace` its first latent frame is clean, and it takes time 0 there by itself.

    guidance: the scale that is passed to a guidance-distilled model (`guidance_embeds`); the pipeline's own is 6.
    """

    guidance: float = 6.0

    def pooled_width(self, config: Config) -> int:
        return int(config["pooled_projection_dim"])

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        check_sizes(NAME, config, channels, text_width, "text_embed_dim", takes_channels(config))

    def conditioning(self, config: Config) -> Conditioning:
        """The first frame, always, of a model from images: as channels, or in its place."""
        kind = config.get("image_condition_type")
        if kind is None:
            return Conditioning()
        rule = Conditioning(("first",), alone=True, blend=BLEND)
        return replace(rule, how="zeros", cut=LOST_FRAMES) if kind == CHANNELS else rule

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without pooled vectors, or with those of another width, and without given frames
        of a model that takes them.
        """
        pooled_BD = pooled_of(NAME, conditions, self.pooled_width(config))
        arguments = {
            "hidden_states": with_condition(x_BCThw, conditions) if takes_channels(config) else x_BCThw,
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
        twice = config.get("image_condition_type") == "token_replace"  # time 0, too, through each norm
        conditions = times * (1 + bool(config["guidance_embeds"]) + twice)
        conditions += linear(1, config["pooled_projection_dim"], e) + linear(1, e, e)
        text = config["text_embed_dim"]
        refiner = times + linear(1, text, e) + linear(1, e, e) + linear(l, text, e)
        refined = linear(l, e, 4 * e) + attention(l, l, e) + linear(1, e, 2 * e) + linear(l, e, 8 * e)
        both = (2 + twice) * linear(1, e, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 2 * hidden)
        single = (1 + twice) * linear(1, e, 3 * e) + linear(s, e, 3 * e) + attention(s, s, e) + linear(s, e, hidden)
        single += linear(s, e + hidden, e)
        ends = (
            linear(n, patch * config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, patch * outputs_of(config))
        )
        blocks = config["num_refiner_layers"] * refined + config["num_layers"] * both
        return conditions + refiner + blocks + config["num_single_layers"] * single + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


def takes_channels(config: Config) -> bool:
    """True for a model whose channels are noisy latents, the latent of the first frame, and a mask."""
    return config.get("image_condition_type") == CHANNELS


def with_condition(x_BCThw: Tensor, conditions: Conditions) -> Tensor:
    """Noisy latents, latents of conditioning frames and their mask, as channels in this order. Raises UserError without them."""
    mask_BT, condition_BCThw = channels_of_frames(NAME, conditions, x_BCThw)
    mask_B1Thw = mask_BT.to(x_BCThw)[:, None, :, None, None].expand(-1, -1, -1, *x_BCThw.shape[3:])
    return torch.cat((x_BCThw, condition_BCThw, mask_B1Thw), dim=1)


def variant(index: Index, parts: Parts) -> ModelCall:
    """The call of a repository's transformer: the pipeline from images has another guidance."""
    return HunyuanVideoCall(GUIDANCE_FROM_IMAGES) if index.get("_class_name") == FROM_IMAGES else HunyuanVideoCall()


def _hunyuan_video(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **small_channels(config, sizes.channels),
        "text_embed_dim": sizes.text_width,
        "pooled_projection_dim": sizes.text_width,
        "rope_axes_dim": (4, 4, 4),
    }


TEMPLATE = "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video:DEFAULT_PROMPT_TEMPLATE"
TEMPLATE_OF_IMAGES = "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video:DEFAULT_PROMPT_TEMPLATE"
POOLED = EncoderRecipe(77, "text_encoder_2", "tokenizer_2", "pooled")
TEXT = TextRecipe((EncoderRecipe(256, layer=-3, template=TEMPLATE), POOLED))


def text_variant(index: Index, parts: Parts) -> TextRecipe:
    """The use of a repository's text encoders: the pipeline from images shows the first frame to the first of them.

    Of the picture's rows it takes every second one, or every fourth of a model that replaces frames; of a negative prompt's, every second.
    """
    if index.get("_class_name") != FROM_IMAGES:
        return TEXT
    picture = PictureUse(every=2 if takes_channels(parts("transformer")) else 4, every_of_black=2)
    return TextRecipe((EncoderRecipe(256, layer=-3, template=TEMPLATE_OF_IMAGES, picture=picture), POOLED))


SAMPLING = Sampling(steps=50, guidance=6.0, sigmas=sigmas_to_zero)

FAMILY = Family(
    "hunyuan-video",
    NAME,
    HunyuanVideoCall(),
    SmallClass(HunyuanVideoCall.patch, 12, _hunyuan_video),
    variant,
    sampling=SAMPLING,
    other_sampling={FROM_IMAGES: replace(SAMPLING, guidance=GUIDANCE_FROM_IMAGES)},
    text=TEXT,
    text_variant=text_variant,
    from_images=FROM_IMAGES,
    published=PUBLISHED["hunyuan_video"],
)
