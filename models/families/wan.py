"""Wan 2.1 and 2.2, text to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    WIDTH_OF_TIMES,
    Config,
    Family,
    Latent,
    Published,
    SmallClass,
    SmallSizes,
    check_sizes,
    filled,
    first_output,
    outputs_of,
    small_channels,
    token_grid,
    width_of,
)
from mmspeed.protocols.calls import Conditions, ModelCall, Predicted


@dataclass(frozen=True)
class WanCall:
    """The call of WanTransformer3DModel, text to video.

    text_tokens: captions are padded with zeros to so many tokens, which are attended to: the model was trained so.
    """

    text_tokens: int = 512
    predicts: Predicted = "velocity"
    timed: bool = False

    def pooled_width(self, config: Config) -> int:
        return 0

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for an image-to-video model and for sizes that differ."""
        check_sizes("WanTransformer3DModel", config, channels, text_width, "text_dim")
        if config["image_dim"] is not None:
            raise UserError("WanTransformer3DModel: image_dim is set: image-to-video models cannot be trained yet")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for captions of more than `text_tokens`."""
        return {
            "hidden_states": x_BCThw,
            "timestep": TIMES * t_B,
            "encoder_hidden_states": filled(conditions, self.text_tokens, x_BCThw.dtype),
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return first_output(output)

    def tokens(self, config: Config, latent: Latent) -> int:
        return math.prod(token_grid(latent, self.patch(config)))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), self.text_tokens, width_of(config)  # noqa: E741 (the legend's letter)
        patch, hidden = math.prod(self.patch(config)), config["ffn_dim"]
        conditions = (
            linear(1, config["freq_dim"], e) + linear(1, e, e) + linear(1, e, 6 * e)
            + linear(l, config["text_dim"], e) + linear(l, e, e)
        )  # fmt: skip
        own = linear(n, e, 4 * e) + attention(n, n, e)
        cross = linear(n, e, 2 * e) + linear(l, e, 2 * e) + attention(n, l, e)
        mlp = linear(n, e, 2 * hidden)
        ends = linear(n, patch * config["in_channels"], e) + linear(n, e, patch * outputs_of(config))
        return conditions + config["num_layers"] * (own + cross + mlp) + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        t, h, w = config["patch_size"]
        return t, h, w


def _wan(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **small_channels(config, sizes.channels),
        "text_dim": sizes.text_width,
        "freq_dim": WIDTH_OF_TIMES,
        "ffn_dim": sizes.hidden(config["ffn_dim"], 2 * width),
    }


def _short(call: ModelCall, text_tokens: int) -> ModelCall:
    """The call with less padding: among many tokens of it the gradients of captions cancel to rounding."""
    assert isinstance(call, WanCall)
    return replace(call, text_tokens=min(call.text_tokens, text_tokens))


PUBLISHED = {
    "wan2.1-1.3b": Published("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 81, 480, 832, 16.0, (4, 16)),
    "wan2.1-14b": Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", 81, 720, 1280, 16.0, (4, 16)),
    "wan2.2-5b": Published("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 121, 704, 1280, 24.0, (4, 32)),
    "wan2.2-a14b": Published("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 81, 720, 1280, 16.0, (4, 16)),
}

FAMILY = Family(
    "wan",
    "WanTransformer3DModel",
    WanCall(),
    SmallClass(WanCall.patch, 12, _wan, _short),
    published=PUBLISHED,
)
