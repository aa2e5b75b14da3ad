"""CogVideoX 2b, 5b and 1.5, text to video and image to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.known_models import PUBLISHED
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    UNLIMITED,
    WIDTH_OF_TIMES,
    Config,
    Family,
    FamilyCall,
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
    first_output,
    outputs_of,
    small_channels,
    token_grid,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditioning, Conditions, ModelCall, Predicted

NAME = "CogVideoXTransformer3DModel"
FROM_IMAGES = "CogVideoXImageToVideoPipeline"


@dataclass(frozen=True)
class CogVideoXCall(FamilyCall):
    """The call of CogVideoXTransformer3DModel: frames before channels, times as integer steps of 1000.

    Captions are padded with zeros to the model's own length, `max_text_seq_length`, as its positions expect. A model with twice as many
    input channels as outputs also takes the latent of the first frame, and zeros after it.

    image_scale: factor from that latent as the codec normalises it to the one that the model takes.
    """

    image_scale: float = 1.0
    predicts: Predicted = "v"

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        check_sizes(NAME, config, channels, text_width, "text_embed_dim", takes_channels(config))

    def conditioning(self, config: Config) -> Conditioning:
        """The first frame as channels, always, of a model from images; a draw from the codec's posterior, as in the pipeline."""
        return Conditioning(("first",), "zeros", alone=True, drawn=True) if takes_channels(config) else Conditioning()

    def limits(self, config: Config) -> SizeLimits:
        """Height and width of the positions that were learnt; of a table of rotary ones that is cut (1.5), at most its own."""
        own = (config["sample_height"], config["sample_width"])
        if config.get("use_learned_positional_embeddings", False):
            return SizeLimits((1, *own), (UNLIMITED, *own))
        cut = config["use_rotary_positional_embeddings"] and config["patch_size_t"] is not None
        return SizeLimits(most=(UNLIMITED, *own)) if cut else SizeLimits()

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for captions of more tokens than the model has places, and without given frames
        of a model that takes them.
        """
        channels_BCThw = x_BCThw
        if takes_channels(config):
            _, condition_BCThw = channels_of_frames(NAME, conditions, x_BCThw)
            channels_BCThw = torch.cat((x_BCThw, self.image_scale * condition_BCThw), dim=1)
        arguments = {
            "hidden_states": channels_BCThw.transpose(1, 2),
            "timestep": (t_B * (TIMES - 1)).round().long(),
            "encoder_hidden_states": filled(conditions, config["max_text_seq_length"], x_BCThw.dtype),
            "return_dict": False,
        }
        if config["ofs_embed_dim"]:
            arguments["ofs"] = x_BCThw.new_full((1,), 2.0)
        if config["use_rotary_positional_embeddings"]:
            grid = token_grid(tuple(x_BCThw.shape[2:]), self.patch(config))
            arguments["image_rotary_emb"] = rotary_of_cogvideox(config, grid, x_BCThw.device)
        return arguments

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return first_output(output).transpose(1, 2)

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), config["max_text_seq_length"], width_of(config)  # noqa: E741
        s, times, patch = n + l, config["time_embed_dim"], math.prod(self.patch(config))
        conditions = linear(1, e, times) + linear(1, times, times) + linear(l, config["text_embed_dim"], e)
        if config["ofs_embed_dim"]:
            conditions += 2 * linear(1, config["ofs_embed_dim"], config["ofs_embed_dim"])
        block = 2 * linear(1, times, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 8 * e)
        ends = (
            linear(n, patch * config["in_channels"], e)
            + linear(1, times, 2 * e)
            + linear(n, e, patch * outputs_of(config))
        )
        return conditions + config["num_layers"] * block + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"] or 1, config["patch_size"], config["patch_size"]


def takes_channels(config: Config) -> bool:
    """True for an image-to-video model: the latent of the first frame is further channels."""
    inputs = config.get("in_channels")
    return inputs is not None and bool(inputs == 2 * outputs_of(config))


def variant(index: Index, parts: Parts) -> ModelCall:
    """The call of a repository's transformer: some were trained with the image's latent divided by the codec's factor instead of
    multiplied.
    """
    if index.get("_class_name") != FROM_IMAGES:
        return CogVideoXCall()
    codec = parts("vae")
    factor = float(codec["scaling_factor"])
    return CogVideoXCall(image_scale=factor**-2 if codec.get("invert_scale_latents", False) else 1.0)


def rotary_of_cogvideox(config: Config, grid: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (N, D), as CogVideoX's pipeline makes them: positions of the model's own size, scaled to fit (1.0) or cut (1.5)."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    t, h, w = grid
    base_h, base_w = config["sample_height"] // config["patch_size"], config["sample_width"] // config["patch_size"]
    arguments: dict[str, Any] = {"embed_dim": config["attention_head_dim"], "grid_size": (h, w), "temporal_size": t}
    if config["patch_size_t"] is None:
        if h / w > base_h / base_w:
            fit_h, fit_w = base_h, round(base_h / h * w)
        else:
            fit_h, fit_w = round(base_w / w * h), base_w
        top, left = round((base_h - fit_h) / 2.0), round((base_w - fit_w) / 2.0)
        arguments["crops_coords"] = ((top, left), (top + fit_h, left + fit_w))
    else:
        arguments |= {"crops_coords": None, "grid_type": "slice", "max_size": (base_h, base_w)}
    cos_ND, sin_ND = get_3d_rotary_pos_embed(**arguments, device=device)
    return cos_ND, sin_ND


def _cogvideox(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    t, h, w = sizes.latent
    return {
        **small_channels(config, sizes.channels),
        "text_embed_dim": sizes.text_width,
        "max_text_seq_length": sizes.text_tokens,
        "time_embed_dim": WIDTH_OF_TIMES,
        "ofs_embed_dim": WIDTH_OF_TIMES if config["ofs_embed_dim"] else None,
        "sample_frames": 1 + (t - 1) * config["temporal_compression_ratio"],
        "sample_height": h,
        "sample_width": w,
        "dropout": 0.0,  # each process draws its own
    }


# the encoder runs over padding, and the transformer takes all of its rows
TEXT = TextRecipe((EncoderRecipe(226, padded=True, stored="all"),))
LAST = TIMES - 1  # index of the noisiest of its timesteps


def _frames_first(x_BCThw: Tensor) -> Tensor:
    return x_BCThw.transpose(1, 2)


def _channels_first(x_BTChw: Tensor, like_BCThw: Tensor) -> Tensor:
    return x_BTChw.transpose(1, 2)


SAMPLING = Sampling(
    steps=50, guidance=6.0, time=lambda timestep: timestep / LAST, pack=_frames_first, unpack=_channels_first
)

FAMILY = Family(
    "cogvideox",
    NAME,
    CogVideoXCall(),
    SmallClass(CogVideoXCall.patch, 16, _cogvideox),
    variant,
    sampling=SAMPLING,
    text=TEXT,
    from_images=FROM_IMAGES,
    published=PUBLISHED["cogvideox"],
)
