"""QwenImage, text to image.

Legend: B batch, C channels, T h w latent, N tokens of an image, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
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
    packed,
    token_grid,
    unpacked,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditions

NAME = "QwenImageTransformer2DModel"
PATCH: Latent = (1, 2, 2)  # of the pipeline
TEXT_TOKENS = 1024  # of the longest caption
PLACES = 4096  # of the table of rotary positions, by the class


@dataclass(frozen=True)
class QwenImageCall(FamilyCall):
    """The call of QwenImageTransformer2DModel, text to image: packed tokens, times from 0 to 1, captions with their mask."""

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for models of edits and layers, and for sizes that differ."""
        tokens = {
            "in_channels": config["in_channels"],
            "out_channels": config["patch_size"] ** 2 * config["out_channels"],
        }
        check_sizes(
            NAME, {**config, **tokens}, channels * math.prod(self.patch(config)), text_width, "joint_attention_dim"
        )
        for key in ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"):
            if config[key]:
                raise UserError(f"{NAME}: {key} is set: models that edit images or make layers cannot be trained yet")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward."""
        patch, b = self.patch(config), len(x_BCThw)
        return {
            "hidden_states": packed(x_BCThw, patch),
            "timestep": TIMES * t_B / TIMES,  # rounded as the pipeline rounds it
            "encoder_hidden_states": conditions.text_BLD.to(x_BCThw.dtype),
            "encoder_hidden_states_mask": conditions.text_mask_BL,
            "img_shapes": [[token_grid(tuple(x_BCThw.shape[2:]), patch)]] * b,
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return unpacked(first_output(output), x_BCThw, self.patch(config))

    def limits(self, config: Config) -> SizeLimits:
        """One frame, and as many tokens along a side as the class's table of positions has for half of them, with a caption behind."""
        side = 2 * (PLACES - TEXT_TOKENS) * config["patch_size"]
        return SizeLimits(most=(1, side, side))

    def tokens(self, config: Config, latent: Latent) -> int:
        """Tokens of the image; captions attend together with them. Raises ValueError for a video too."""
        only_images(latent)
        return super().tokens(config, latent)

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        s = n + l
        conditions = linear(1, 256, e) + linear(1, e, e) + linear(l, config["joint_attention_dim"], e)
        block = 2 * linear(1, e, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 8 * e)
        outputs = config["patch_size"] ** 2 * config["out_channels"]
        ends = linear(n, config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, outputs)
        return conditions + config["num_layers"] * block + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return 1, config["patch_size"], config["patch_size"]


def _qwen_image(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        "in_channels": sizes.channels * math.prod(QwenImageCall.patch(config)),
        "out_channels": sizes.channels,
        "joint_attention_dim": sizes.text_width,
        "axes_dims_rope": (4, 4, 4),
    }


# of the last block, whose text goes nowhere
LAST_TEXT = ("attn.add_q_proj.*", "attn.norm_added_q.*", "attn.to_add_out.*", "txt_mlp.*")


SAMPLING = Sampling(
    steps=50,
    guidance=4.0,
    sigmas=even_sigmas,
    pack=partial(packed, patch=PATCH),
    unpack=partial(unpacked, patch=PATCH),
    renormed=True,
)


def template() -> dict[str, Any]:
    """The words around a caption, from the pipeline, which keeps them in its objects."""
    from diffusers import QwenImagePipeline

    nothing: Any = None
    pipeline: Any = QwenImagePipeline(nothing, nothing, nothing, nothing, nothing)
    return {"template": pipeline.prompt_template_encode, "crop_start": pipeline.prompt_template_encode_start_idx}


TEXT = TextRecipe((EncoderRecipe(TEXT_TOKENS, layer=-1, template="mmspeed.models.families.qwen_image:template"),))

FAMILY = Family(
    "qwen-image",
    NAME,
    QwenImageCall(),
    SmallClass(QwenImageCall.patch, 12, _qwen_image),
    sampling=SAMPLING,
    text=TEXT,
    published=PUBLISHED["qwen_image"],
    unused=tuple(f"transformer_blocks.-1.{part}" for part in LAST_TEXT),
)
