"""Wan 2.1 and 2.2, text to video and image to video; that of 2.1 also takes an image encoder's embeddings.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width, I rows of a picture's embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    WIDTH_OF_TIMES,
    Config,
    Family,
    FamilyCall,
    ImageRecipe,
    Index,
    Latent,
    Parts,
    Sampling,
    SizeLimits,
    SmallClass,
    SmallSizes,
    channels_of_frames,
    check_sizes,
    filled,
    outputs_of,
    per_token,
    pictures_of,
    small_channels,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditioning, Conditions, ModelCall

SMALL_IMAGE = 5, 16  # rows and width of a picture's embedding, in a small model
TEXT_BEHIND_IMAGES = 512  # rows, by the class
PLACES = 1024  # of the table of rotary positions, by the class
MASKS = 4  # frames of pixels of a latent frame, and so channels of the mask


@dataclass(frozen=True)
class WanCall(FamilyCall):
    """The call of WanTransformer3DModel, text to video, and image to video by 36 input channels or a time for each token.

    text_tokens: captions are padded with zeros to so many tokens, which are attended to: the model was trained so.
    expand_timesteps: each token has its own time (Wan 2.2 5B), which a given first frame needs.
    image_tokens: rows of a given picture's embedding, for models that take them (`image_dim`, Wan 2.1).
    """

    text_tokens: int = 512
    image_tokens: int = 257
    expand_timesteps: bool = False

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ, and for an image encoder's embeddings without channels of conditioning frames."""
        check_sizes("WanTransformer3DModel", config, channels, text_width, "text_dim", takes_channels(config))
        if config["image_dim"] is not None and not takes_channels(config):
            raise UserError(
                "WanTransformer3DModel: image_dim is set, but its input channels do not hold given frames: no known model of Wan is so"
            )

    def conditioning(self, config: Config) -> Conditioning:
        """The first frame, or those before, clean, with a time for each token; or the first, or first and last, as channels, always.

        A model that takes embeddings of pictures takes that of the first frame, or with positions for two those of first and last.
        """
        if self.expand_timesteps:
            return Conditioning(("none", "first", "prefix"))
        if not takes_channels(config):
            return Conditioning()
        if config.get("image_dim") is None:
            return Conditioning(("first", "first_last"), "grey")
        mode = "first" if config.get("pos_embed_seq_len") is None else "first_last"
        return Conditioning((mode,), "grey", embedding=(self.image_tokens, config["image_dim"]), whole=True)

    def limits(self, config: Config) -> SizeLimits:
        """As many tokens along each dim as the table of rotary positions has."""
        t, h, w = (size * config.get("rope_max_seq_len", PLACES) for size in self.patch(config))
        return SizeLimits(most=(t, h, w))

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for captions of more than `text_tokens`, and without a needed condition."""
        latent: Latent = x_BCThw.shape[2], x_BCThw.shape[3], x_BCThw.shape[4]
        times = per_token(conditions.times_of(t_B), self.tokens(config, latent)) if self.expand_timesteps else t_B
        return {
            "hidden_states": with_condition(x_BCThw, conditions) if takes_channels(config) else x_BCThw,
            "timestep": TIMES * times,
            "encoder_hidden_states": filled(conditions, self.rows_of_text(config), x_BCThw.dtype),
            **self._pictures(config, conditions, x_BCThw.dtype),
            "return_dict": False,
        }

    def _pictures(self, config: Config, conditions: Conditions, dtype: torch.dtype) -> dict[str, Tensor]:
        """Embeddings (pictures of all samples, I, D), those of a sample one after the other, of a model that takes them."""
        width = config.get("image_dim")
        if width is None:
            return {}
        image_BKID = pictures_of("WanTransformer3DModel", conditions, width)
        return {"encoder_hidden_states_image": image_BKID.to(dtype).flatten(0, 1)}

    def rows_of_text(self, config: Config) -> int:
        """Rows of a caption; the class counts on 512 behind those of pictures."""
        return self.text_tokens if config.get("image_dim") is None else TEXT_BEHIND_IMAGES

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), self.rows_of_text(config), width_of(config)  # noqa: E741 (the legend's letter)
        patch, pictures = math.prod(self.patch(config)), 0
        times = n if self.expand_timesteps else 1
        conditions = (
            linear(times, config["freq_dim"], e) + linear(times, e, e) + linear(times, e, 6 * e)
            + linear(l, config["text_dim"], e) + linear(l, e, e)
        )  # fmt: skip
        if (width := config.get("image_dim")) is not None:  # keys and values of their own, for the same queries
            rows = self.image_tokens * (1 if config.get("pos_embed_seq_len") is None else 2)
            conditions += linear(rows, width, width) + linear(rows, width, e)
            pictures = linear(rows, e, 2 * e) + attention(n, rows, e)
        ends = linear(n, patch * config["in_channels"], e) + linear(n, e, patch * outputs_of(config))
        return conditions + config["num_layers"] * (self.block_flops(config, n) + pictures) + ends

    def block_flops(self, config: Config, n: int) -> int:
        """Operations of a block for n tokens, without those for pictures."""
        l, e = self.rows_of_text(config), width_of(config)  # noqa: E741 (the legend's letter)
        own = linear(n, e, 4 * e) + attention(n, n, e)
        cross = linear(n, e, 2 * e) + linear(l, e, 2 * e) + attention(n, l, e)
        return own + cross + linear(n, e, 2 * config["ffn_dim"])

    @staticmethod
    def patch(config: Config) -> Latent:
        t, h, w = config["patch_size"]
        return t, h, w


def takes_channels(config: Config) -> bool:
    """True for an image-to-video model: noisy latents, masks and conditions are its channels."""
    inputs = config.get("in_channels")
    return inputs is not None and bool(inputs == 2 * outputs_of(config) + MASKS)


def with_condition(x_BCThw: Tensor, conditions: Conditions) -> Tensor:
    """Noisy latents, masks of conditioning frames of pixels, and their latents, as channels in this order.

    A latent frame after the first stands for `MASKS` frames of pixels, of which the last may be given. Raises UserError without them.
    """
    mask_BT, condition_BCThw = channels_of_frames("WanTransformer3DModel", conditions, x_BCThw)
    mask_B4T = mask_BT.to(x_BCThw)[:, None].repeat(1, MASKS, 1)
    mask_B4T[:, :-1, 1:] = 0
    mask_B4Thw = mask_B4T[..., None, None].expand(-1, -1, -1, *x_BCThw.shape[3:])
    return torch.cat((x_BCThw, mask_B4Thw, condition_BCThw), dim=1)


def variant(index: Index, parts: Parts) -> ModelCall:
    """The call of a repository's transformer: Wan 2.2 5B gives each token a time."""
    return WanCall(expand_timesteps=bool(index.get("expand_timesteps", False)))


def small_wan(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    """The arguments of a small model that differ from the large one's."""
    image: dict[str, Any] = {}
    if config.get("image_dim") is not None:
        places = None if config.get("pos_embed_seq_len") is None else 2 * SMALL_IMAGE[0]
        image = {"image_dim": SMALL_IMAGE[1], "added_kv_proj_dim": width, "pos_embed_seq_len": places}
    return {
        **image,
        **small_channels(config, sizes.channels),
        "text_dim": sizes.text_width,
        "freq_dim": WIDTH_OF_TIMES,
        "ffn_dim": sizes.hidden(config["ffn_dim"], 2 * width),
    }


def shortened(call: ModelCall, text_tokens: int) -> ModelCall:
    """The call with less padding: among many tokens of it the gradients of captions cancel to rounding."""
    assert isinstance(call, WanCall)
    return replace(call, text_tokens=min(call.text_tokens, text_tokens), image_tokens=SMALL_IMAGE[0])


# padded with zeros to 512 rows by the call: the encoder is given the mask
TEXT = TextRecipe((EncoderRecipe(512, clean="diffusers.pipelines.wan.pipeline_wan:prompt_clean"),))
SAMPLING = Sampling(steps=50, guidance=5.0)

FAMILY = Family(
    "wan",
    "WanTransformer3DModel",
    WanCall(),
    SmallClass(WanCall.patch, 12, small_wan, shortened),
    variant,
    sampling=SAMPLING,
    text=TEXT,
    image=ImageRecipe(layer=-2),  # the hidden states before the last layer
    from_images="WanImageToVideoPipeline",
    one_image=True,
    published=PUBLISHED["wan"],
)
