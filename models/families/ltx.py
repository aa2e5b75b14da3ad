"""LTX-Video, text to video and image to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width.
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
    SmallClass,
    SmallSizes,
    check_sizes,
    even_sigmas,
    first_output,
    outputs_of,
    packed,
    per_token,
    small_channels,
    token_grid,
    unpacked,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditioning, Conditions


@dataclass(frozen=True)
class LtxCall(FamilyCall):
    """The call of LTXVideoTransformer3DModel, text to video: tokens are packed, and positions are in seconds and pixels."""

    timed: bool = True

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        check_sizes(
            "LTXVideoTransformer3DModel", config, channels * math.prod(self.patch(config)), text_width, "caption_channels"
        )  # fmt: skip

    def conditioning(self, config: Config) -> Conditioning:
        """The first frame, or those before, clean, at time 0 of their tokens."""
        return Conditioning(("none", "first", "prefix"))

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without frames per second."""
        if conditions.fps_B is None or conditions.strides is None:
            raise UserError(
                "LTXVideoTransformer3DModel needs the frames per second of each clip, and the codec's strides"
            )
        frames, height, width = token_grid(tuple(x_BCThw.shape[2:]), self.patch(config))  # the class counts in tokens
        tokens = frames * height * width
        seconds = (conditions.strides.temporal / conditions.fps_B)[:, None, None, None, None]
        return {
            "hidden_states": packed(x_BCThw, self.patch(config)),
            "timestep": TIMES
            * (t_B if conditions.conditioning_mask is None else per_token(conditions.times_of(t_B), tokens)),
            "encoder_hidden_states": conditions.text_BLD.to(x_BCThw.dtype),
            "encoder_attention_mask": conditions.text_mask_BL,
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (seconds, conditions.strides.spatial, conditions.strides.spatial),
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return unpacked(first_output(output), x_BCThw, self.patch(config))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        cross_width = config["cross_attention_dim"]
        conditions = (
            linear(1, 256, e) + linear(1, e, e) + linear(1, e, 6 * e)
            + linear(l, config["caption_channels"], e) + linear(l, e, e)
        )  # fmt: skip
        own = linear(n, e, 4 * e) + attention(n, n, e)
        cross = linear(n, e, 2 * e) + linear(l, cross_width, 2 * e) + attention(n, l, e)
        ends = linear(n, config["in_channels"], e) + linear(n, e, outputs_of(config))
        return conditions + config["num_layers"] * (own + cross + linear(n, e, 8 * e)) + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


def _ltx(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    own = config["num_attention_heads"] * config["attention_head_dim"]
    cross = config["cross_attention_dim"]
    return {
        **small_channels(config, sizes.channels * math.prod(LtxCall.patch(config))),
        "caption_channels": sizes.text_width,
        "cross_attention_dim": width if cross == own else cross,
    }


# the encoder runs over padding, whose rows the transformer's mask leaves out
TEXT = TextRecipe((EncoderRecipe(128, padded=True),))
PATCH: Latent = (1, 1, 1)  # of the pipeline


SAMPLING = Sampling(
    steps=50, guidance=3.0, sigmas=even_sigmas, pack=partial(packed, patch=PATCH), unpack=partial(unpacked, patch=PATCH)
)

FAMILY = Family(
    "ltx",
    "LTXVideoTransformer3DModel",
    LtxCall(),
    SmallClass(LtxCall.patch, 12, _ltx),
    sampling=SAMPLING,
    text=TEXT,
    from_images="LTXImageToVideoPipeline",
    image_in_latents=True,
    published=PUBLISHED["ltx"],
)
