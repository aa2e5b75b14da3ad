"""Mochi, text to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width, P width of captions in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

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
    check_sizes,
    first_output,
    outputs_of,
    small_channels,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditions

POOLING_HEADS = 8  # of the class, which divide the captions' width


@dataclass(frozen=True)
class MochiCall(FamilyCall):
    """The call of MochiTransformer3DModel: its time runs from noise, 0, to data, 1000, and it returns data - noise.

    Each caption attends by its own tokens alone.
    """

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        check_sizes("MochiTransformer3DModel", config, channels, text_width, "text_embed_dim")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Captions without a row, such as the empty one, get one that the mask leaves out."""
        missing = int(conditions.text_BLD.shape[1] == 0)
        return {
            "hidden_states": x_BCThw,
            "timestep": TIMES * (1.0 - t_B),
            "encoder_hidden_states": F.pad(conditions.text_BLD.to(x_BCThw.dtype), (0, 0, 0, missing)),
            "encoder_attention_mask": F.pad(conditions.text_mask_BL, (0, missing)),
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return -first_output(output)

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        p, text, patch = config["pooled_projection_dim"], config["text_embed_dim"], math.prod(self.patch(config))
        conditions = linear(1, config["time_embed_dim"], e) + linear(1, e, e) + linear(l, text, p)
        pooled = linear(l + 1, text, 2 * text) + linear(1, text, text) + attention(1, l + 1, text) + linear(1, text, e)
        rotary = linear(n, 3, e // 2)  # its frequencies are trained
        joint = linear(n, e, 4 * e) + linear(l, p, 3 * e) + attention(n + l, n + l, e)
        block = linear(1, e, 4 * e) + joint + linear(n, e, 3 * (8 * e // 3))
        caption = linear(1, e, 4 * p) + linear(l, e, p) + linear(l, p, 3 * (8 * p // 3))
        ends = (
            linear(n, patch * config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, patch * outputs_of(config))
        )
        blocks = config["num_layers"] * block + (config["num_layers"] - 1) * caption + linear(1, e, p)
        return conditions + pooled + rotary + blocks + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return 1, config["patch_size"], config["patch_size"]


def _mochi(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **small_channels(config, sizes.channels),
        "text_embed_dim": -(-sizes.text_width // POOLING_HEADS) * POOLING_HEADS,
        "pooled_projection_dim": width // 2,
    }


TEXT = TextRecipe((EncoderRecipe(256),))
FORCED = "force_zeros_for_empty_prompt"  # of model_index.json, as in the published one


def not_empty(caption: str) -> str | None:
    """The caption; None for the empty one, of which the model sees no row."""
    return caption or None


def _text(index: Index, parts: Parts) -> TextRecipe:
    """The use of the encoder: where the repository says so, the pipeline masks all rows of the empty caption."""
    clean = "mmspeed.models.families.mochi:not_empty" if index.get(FORCED) else None
    return TextRecipe((EncoderRecipe(256, clean=clean),))


THRESHOLD = 0.025  # noise level up to which the first half of the steps goes evenly


def _sigmas(steps: int) -> list[float]:
    """Noise levels that fall evenly, then with the square of the step, as the pipeline's."""
    from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule

    return [float(sigma) for sigma in linear_quadratic_schedule(steps, THRESHOLD)]


# its scheduler counts from noise, and takes the model's own sign
SAMPLING = Sampling(steps=64, guidance=4.5, sigmas=_sigmas, time=lambda timestep: 1 - timestep / TIMES, sign=-1.0)

FAMILY = Family(
    "mochi",
    "MochiTransformer3DModel",
    MochiCall(),
    SmallClass(MochiCall.patch, 12, _mochi),
    sampling=SAMPLING,
    text=TEXT,
    text_variant=_text,
    published=PUBLISHED["mochi"],
    # the last block returns no text
    unused=("transformer_blocks.-1.attn1.add_q_proj.*", "transformer_blocks.-1.attn1.norm_added_q.*"),
)
