"""HunyuanVideo 1.5, text to video and image to video.

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, G glyph tokens, I image tokens, E model width.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspeed.config.known_models import PUBLISHED
from mmspeed.errors import UserError
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.models.families.base import (
    TIMES,
    Config,
    Family,
    FamilyCall,
    ImageRecipe,
    Index,
    Latent,
    Parts,
    Sampling,
    SmallClass,
    SmallSizes,
    channels_of_frames,
    pictures_of,
    sigmas_to_zero,
    width_of,
)
from mmspeed.models.text.recipes import EncoderRecipe, TextRecipe
from mmspeed.protocols.calls import Conditioning, Conditions, ModelCall

FROM_IMAGES = "HunyuanVideo15ImageToVideoPipeline"
NAME = "HunyuanVideo15Transformer3DModel"
GLYPHS, GLYPHS_MASK = "text_2", "text_2_mask"  # the words to be drawn, by an encoder of bytes
HIDDEN_OF_GLYPHS = 2048  # of the class
SMALL_WIDTH = 8


@dataclass(frozen=True)
class HunyuanVideo15Call(FamilyCall):
    """The call of HunyuanVideo15Transformer3DModel.

    Text to video has zeros for the condition, its mask and the image's embedding, as its pipeline does.

    Args:
        glyph_tokens: rows of the second caption, filled with zeros that the mask leaves out.
        image_tokens: rows of the image's embedding; where all are zeros, the class leaves them out.
        images: True for a model that is always given the first frame.
    """

    glyph_tokens: int = 256
    image_tokens: int = 729
    images: bool = False

    def texts(self, config: Config) -> dict[str, int]:
        """Widths of the captions of further encoders."""
        return {GLYPHS: int(config["text_embed_2_dim"])}

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        inputs, outputs = config["in_channels"], config["out_channels"]
        if outputs != channels or inputs != 2 * channels + 1:
            raise UserError(
                f"{NAME} takes {inputs} channels (noise, condition, mask) and returns {outputs}, the latents have {channels}: name the "
                "model's own codec under `vae`"
            )
        if config["text_embed_dim"] != text_width:
            raise UserError(
                f"{NAME} takes captions of width {config['text_embed_dim']}, here {text_width}: name the model's own text encoder under "
                "`text`"
            )
        if config["use_meanflow"]:
            raise UserError(
                f"{NAME}: use_meanflow is set: models of few steps and for larger sizes cannot be trained yet"
            )

    def conditioning(self, config: Config) -> Conditioning:
        """The first frame, always, of a model from images: its latent alone as channels, and the embedding of the picture."""
        if not self.images:
            return Conditioning()
        return Conditioning(("first",), "zeros", alone=True, embedding=(self.image_tokens, config["image_embed_dim"]))

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for inputs that are missing, or of another size."""
        glyphs_BGD, mask_BG = self._glyphs(config, conditions)
        condition_BCThw, mask_B1Thw, image_BID = self._frames(config, x_BCThw, conditions)
        return {
            "hidden_states": torch.cat([x_BCThw, condition_BCThw, mask_B1Thw], dim=1),
            "timestep": TIMES * t_B,
            "encoder_hidden_states": conditions.text_BLD.to(x_BCThw.dtype),
            "encoder_attention_mask": conditions.text_mask_BL,
            "encoder_hidden_states_2": glyphs_BGD.to(x_BCThw.dtype),
            "encoder_attention_mask_2": mask_BG,
            "image_embeds": image_BID,
            "return_dict": False,
        }

    def _frames(self, config: Config, x_BCThw: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor, Tensor]:
        """(latents of conditioning frames (B, C, T, h, w), their mask (B, 1, T, h, w), the picture's embedding (B, I, D))."""
        width = config["image_embed_dim"]
        if not self.images:
            unknown_BCThw = torch.zeros_like(x_BCThw)
            return unknown_BCThw, unknown_BCThw[:, :1], x_BCThw.new_zeros(len(x_BCThw), self.image_tokens, width)
        mask_BT, condition_BCThw = channels_of_frames(NAME, conditions, x_BCThw)
        mask_B1Thw = mask_BT[:, None, :, None, None].to(x_BCThw).expand_as(x_BCThw[:, :1])
        return condition_BCThw, mask_B1Thw, pictures_of(NAME, conditions, width)[:, 0].to(x_BCThw.dtype)

    def _glyphs(self, config: Config, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """The second caption (B, G, D), filled with zeros, and its mask."""
        width = config["text_embed_2_dim"]
        if GLYPHS not in conditions.named or GLYPHS_MASK not in conditions.named:
            raise UserError(
                f"{NAME} needs a second caption of width {width} (the words to be drawn): name the model's own text encoders under `text`"
            )
        text_BLD, mask_BL = conditions.named[GLYPHS], conditions.named[GLYPHS_MASK].bool()
        missing = self.glyph_tokens - text_BLD.shape[1]
        if missing < 0 or text_BLD.shape[2] != width:
            raise UserError(
                f"{NAME} takes second captions of at most {self.glyph_tokens} tokens of width {width}, here {text_BLD.shape[1]} of width "
                f"{text_BLD.shape[2]}: name the model's own text encoders under `text`"
            )
        text_BLD = text_BLD.masked_fill(~mask_BL[..., None], 0.0)
        return F.pad(text_BLD, (0, 0, 0, missing)), F.pad(mask_BL, (0, missing))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, width_of(config)  # noqa: E741
        g, i, patch = self.glyph_tokens, self.image_tokens, math.prod(self.patch(config))
        s, hidden, image, text = (
            n + l + g + i,
            int(config["mlp_ratio"] * e),
            config["image_embed_dim"],
            config["text_embed_dim"],
        )
        times = linear(1, 256, e) + linear(1, e, e)
        refined = linear(l, e, 4 * e) + attention(l, l, e) + linear(1, e, 2 * e) + linear(l, e, 8 * e)
        caption = times + linear(1, text, e) + linear(1, e, e) + linear(l, text, e)
        caption += config["num_refiner_layers"] * refined
        glyphs = linear(g, config["text_embed_2_dim"], HIDDEN_OF_GLYPHS) + linear(g, HIDDEN_OF_GLYPHS, HIDDEN_OF_GLYPHS)
        glyphs += linear(g, HIDDEN_OF_GLYPHS, e)
        images = linear(i, image, image) + linear(i, image, e)
        block = 2 * linear(1, e, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 2 * hidden)
        ends = (
            linear(n, patch * config["in_channels"], e)
            + linear(1, e, 2 * e)
            + linear(n, e, patch * config["out_channels"])
        )
        return times + caption + glyphs + images + config["num_layers"] * block + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


def _hunyuan_video15(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        "in_channels": 2 * sizes.channels + 1,
        "out_channels": sizes.channels,
        "text_embed_dim": sizes.text_width,
        "text_embed_2_dim": SMALL_WIDTH,
        "image_embed_dim": SMALL_WIDTH,
        "rope_axes_dim": (4, 4, 4),
    }


def _few(call: ModelCall, text_tokens: int) -> ModelCall:
    """The call with few rows of glyphs and of the image."""
    assert isinstance(call, HunyuanVideo15Call)
    return replace(call, glyph_tokens=text_tokens, image_tokens=min(call.image_tokens, 3))


def variant(index: Index, parts: Parts) -> ModelCall:
    """The call of a repository's transformer: by its pipeline it is always given a first frame, or never."""
    return HunyuanVideo15Call(images=index.get("_class_name") == FROM_IMAGES)


# of the last block, whose text goes nowhere
LAST_TEXT = ("attn.add_q_proj.*", "attn.norm_added_q.*", "attn.to_add_out.*", "ff_context.*")
SAMPLING = Sampling(steps=50, guidance=6.0, sigmas=sigmas_to_zero)


def template() -> dict[str, Any]:
    """The system's message before a caption, from the pipeline, whose function has it as a default."""
    from diffusers import HunyuanVideo15Pipeline

    parameters = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    values = {name: parameters[name].default for name in ("system_message", "crop_start")}
    return {"template": values["system_message"], "crop_start": values["crop_start"], "chat": True}


# words in quotation marks of a caption, by an encoder of bytes
GLYPH_WORDS = "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5:extract_glyph_texts"
TEXT = TextRecipe(
    (
        EncoderRecipe(1000, layer=-3, template="mmspeed.models.families.hunyuan_video15:template"),
        EncoderRecipe(256, "text_encoder_2", "tokenizer_2", GLYPHS, clean=GLYPH_WORDS),
    )
)

FAMILY = Family(
    "hunyuan-video1.5",
    NAME,
    HunyuanVideo15Call(),
    SmallClass(HunyuanVideo15Call.patch, 12, _hunyuan_video15, _few),
    variant,
    sampling=SAMPLING,
    text=TEXT,
    image=ImageRecipe(processor="feature_extractor", processing={"do_resize": True, "do_convert_rgb": True}),
    from_images=FROM_IMAGES,
    one_image=True,
    published=PUBLISHED["hunyuan_video15"],
    unused=(
        "image_embedder.*",  # text to video gives it zeros, and leaves its tokens out
        *(f"transformer_blocks.-1.{part}" for part in LAST_TEXT),
    ),
)
