"""Call diffusers' video transformers in training: a call for each class, looked up by its name.

Each call does what the class's own text-to-video pipeline does around its transformer; nothing here knows a pipeline. Times are in [0, 1].

Legend: B batch, C channels, T h w latent, N tokens of a video, L caption tokens, D text width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspeed.errors import UserError, nearest
from mmspeed.models.diffusers.products import attention, linear
from mmspeed.protocols.calls import Conditions, ModelCall, Predicted

Config = Mapping[str, Any]  # the arguments that a class was made with
Latent = tuple[int, int, int]
TIMES = 1000.0  # units of these models' time, from 0 to 1 of ours


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
        _check_sizes("WanTransformer3DModel", config, channels, text_width, "text_dim")
        if config["image_dim"] is not None:
            raise UserError("WanTransformer3DModel: image_dim is set: image-to-video models cannot be trained yet")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for captions of more than `text_tokens`."""
        return {
            "hidden_states": x_BCThw,
            "timestep": TIMES * t_B,
            "encoder_hidden_states": _filled(conditions, self.text_tokens, x_BCThw.dtype),
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return _first(output)

    def tokens(self, config: Config, latent: Latent) -> int:
        return math.prod(token_grid(latent, self.patch(config)))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), self.text_tokens, _width(config)  # noqa: E741 (the legend's letter)
        patch, hidden = math.prod(self.patch(config)), config["ffn_dim"]
        conditions = (
            linear(1, config["freq_dim"], e) + linear(1, e, e) + linear(1, e, 6 * e)
            + linear(l, config["text_dim"], e) + linear(l, e, e)
        )  # fmt: skip
        own = linear(n, e, 4 * e) + attention(n, n, e)
        cross = linear(n, e, 2 * e) + linear(l, e, 2 * e) + attention(n, l, e)
        mlp = linear(n, e, 2 * hidden)
        ends = linear(n, patch * config["in_channels"], e) + linear(n, e, patch * _outputs(config))
        return conditions + config["num_layers"] * (own + cross + mlp) + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        t, h, w = config["patch_size"]
        return t, h, w


@dataclass(frozen=True)
class LtxCall:
    """The call of LTXVideoTransformer3DModel, text to video: tokens are packed, and positions are in seconds and pixels."""

    predicts: Predicted = "velocity"
    timed: bool = True

    def pooled_width(self, config: Config) -> int:
        return 0

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for sizes that differ."""
        _check_sizes(
            "LTXVideoTransformer3DModel", config, channels * math.prod(self.patch(config)), text_width, "caption_channels"
        )  # fmt: skip

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without frames per second."""
        if conditions.fps_B is None or conditions.strides is None:
            raise UserError(
                "LTXVideoTransformer3DModel needs the frames per second of each clip, and the codec's strides"
            )
        frames, height, width = token_grid(tuple(x_BCThw.shape[2:]), self.patch(config))  # the class counts in tokens
        seconds = (conditions.strides.temporal / conditions.fps_B)[:, None, None, None, None]
        return {
            "hidden_states": _packed(x_BCThw, self.patch(config)),
            "timestep": TIMES * t_B,
            "encoder_hidden_states": conditions.text_BLD.to(x_BCThw.dtype),
            "encoder_attention_mask": conditions.text_mask_BL,
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (seconds, conditions.strides.spatial, conditions.strides.spatial),
            "return_dict": False,
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return _unpacked(_first(output), self.patch(config), x_BCThw)

    def tokens(self, config: Config, latent: Latent) -> int:
        return math.prod(token_grid(latent, self.patch(config)))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, _width(config)  # noqa: E741
        cross_width = config["cross_attention_dim"]
        conditions = (
            linear(1, 256, e) + linear(1, e, e) + linear(1, e, 6 * e)
            + linear(l, config["caption_channels"], e) + linear(l, e, e)
        )  # fmt: skip
        own = linear(n, e, 4 * e) + attention(n, n, e)
        cross = linear(n, e, 2 * e) + linear(l, cross_width, 2 * e) + attention(n, l, e)
        ends = linear(n, config["in_channels"], e) + linear(n, e, _outputs(config))
        return conditions + config["num_layers"] * (own + cross + linear(n, e, 8 * e)) + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


@dataclass(frozen=True)
class CogVideoXCall:
    """The call of CogVideoXTransformer3DModel, text to video: frames before channels, times as integer steps of 1000.

    Captions are padded with zeros to the model's own length, `max_text_seq_length`, as its positions expect.
    """

    predicts: Predicted = "v"
    timed: bool = False

    def pooled_width(self, config: Config) -> int:
        return 0

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for an image-to-video model and for sizes that differ."""
        _check_sizes("CogVideoXTransformer3DModel", config, channels, text_width, "text_embed_dim")

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError for captions of more tokens than the model has places."""
        arguments = {
            "hidden_states": x_BCThw.transpose(1, 2),
            "timestep": (t_B * (TIMES - 1)).round().long(),
            "encoder_hidden_states": _filled(conditions, config["max_text_seq_length"], x_BCThw.dtype),
            "return_dict": False,
        }
        if config["ofs_embed_dim"]:
            arguments["ofs"] = x_BCThw.new_full((1,), 2.0)
        if config["use_rotary_positional_embeddings"]:
            grid = token_grid(tuple(x_BCThw.shape[2:]), self.patch(config))
            arguments["image_rotary_emb"] = rotary_of_cogvideox(config, grid, x_BCThw.device)
        return arguments

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return _first(output).transpose(1, 2)

    def tokens(self, config: Config, latent: Latent) -> int:
        """Tokens of the video; captions attend together with them."""
        return math.prod(token_grid(latent, self.patch(config)))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), config["max_text_seq_length"], _width(config)  # noqa: E741
        s, times, patch = n + l, config["time_embed_dim"], math.prod(self.patch(config))
        conditions = linear(1, e, times) + linear(1, times, times) + linear(l, config["text_embed_dim"], e)
        if config["ofs_embed_dim"]:
            conditions += 2 * linear(1, config["ofs_embed_dim"], config["ofs_embed_dim"])
        block = 2 * linear(1, times, 6 * e) + linear(s, e, 4 * e) + attention(s, s, e) + linear(s, e, 8 * e)
        ends = (
            linear(n, patch * config["in_channels"], e)
            + linear(1, times, 2 * e)
            + linear(n, e, patch * _outputs(config))
        )
        return conditions + config["num_layers"] * block + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"] or 1, config["patch_size"], config["patch_size"]


@dataclass(frozen=True)
class HunyuanVideoCall:
    """The call of HunyuanVideoTransformer3DModel, text to video.

    guidance: the scale that is passed to a guidance-distilled model (`guidance_embeds`); the pipeline's own is 6.
    """

    guidance: float = 6.0
    predicts: Predicted = "velocity"
    timed: bool = False

    def pooled_width(self, config: Config) -> int:
        return int(config["pooled_projection_dim"])

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Raises UserError for an image-to-video model and for sizes that differ."""
        _check_sizes("HunyuanVideoTransformer3DModel", config, channels, text_width, "text_embed_dim")
        if config["image_condition_type"] is not None:
            raise UserError(
                f"HunyuanVideoTransformer3DModel: image_condition_type is {config['image_condition_type']}: image-to-video models "
                "cannot be trained yet"
            )

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward. Raises UserError without pooled vectors, or with those of another width."""
        pooled_BD, width = conditions.pooled_BD, self.pooled_width(config)
        if pooled_BD is None or pooled_BD.shape[1] != width:
            pooled = "none" if pooled_BD is None else f"one of width {pooled_BD.shape[1]}"
            raise UserError(
                f"HunyuanVideoTransformer3DModel needs a pooled vector of width {width} for each caption, the text encoder gave {pooled}: "
                "encode captions with one that has it, such as CLIP's"
            )
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

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        return _first(output)

    def tokens(self, config: Config, latent: Latent) -> int:
        """Tokens of the video; captions attend together with them."""
        return math.prod(token_grid(latent, self.patch(config)))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        n, l, e = self.tokens(config, latent), text_tokens, _width(config)  # noqa: E741
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
            linear(n, patch * config["in_channels"], e) + linear(1, e, 2 * e) + linear(n, e, patch * _outputs(config))
        )
        blocks = config["num_refiner_layers"] * refined + config["num_layers"] * both
        return conditions + refiner + blocks + config["num_single_layers"] * single + ends

    @staticmethod
    def patch(config: Config) -> Latent:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]


CALLS: Mapping[str, ModelCall] = {
    "WanTransformer3DModel": WanCall(),
    "LTXVideoTransformer3DModel": LtxCall(),
    "CogVideoXTransformer3DModel": CogVideoXCall(),
    "HunyuanVideoTransformer3DModel": HunyuanVideoCall(),
}


def class_name(model: nn.Module) -> str | None:
    """The name of a model's class in `CALLS`, below any mixins; None where it has none."""
    return next((own.__name__ for own in type(model).__mro__ if own.__name__ in CALLS), None)


def call_for(model: nn.Module) -> ModelCall:
    """The call of a model, by the name of its class. Raises UserError with the known classes for any other."""
    name = class_name(model)
    if name is None:
        own = type(model).__name__
        raise UserError(
            f"no call is known for the class {own}{nearest(own, list(CALLS))}: known are {', '.join(CALLS)}; "
            "for another class give call=, an object like those of mmspeed/models/diffusers/calls.py"
        )
    return CALLS[name]


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


def token_grid(latent: tuple[int, ...], patch: tuple[int, ...]) -> Latent:
    """Tokens along time, height and width. Raises ValueError, with the nearest sizes, where the patch does not divide the latent."""
    for label, size, step in zip(("frames", "height", "width"), latent, patch, strict=True):
        if size % step:
            lower = size // step * step
            near = f"{lower} or {lower + step}" if lower else f"{step}"
            raise ValueError(
                f"latent {label} {size} of {tuple(latent)} is no multiple of {step} of the model's patch: use {near}"
            )
    t, h, w = (size // step for size, step in zip(latent, patch, strict=True))
    return t, h, w


def _width(config: Config) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _outputs(config: Config) -> int:
    return int(config["out_channels"] or config["in_channels"])


def _check_sizes(name: str, config: Config, channels: int, text_width: int, text_key: str) -> None:
    """Raises UserError where latents or captions have other sizes than the model's."""
    inputs, outputs = config["in_channels"], _outputs(config)
    if inputs != channels or outputs != channels:
        raise UserError(
            f"{name} takes {inputs} channels and returns {outputs}, the latents here have {channels}: name the model's own codec under "
            "`vae` (a model that takes more than it returns is for image-to-video, which cannot be trained yet)"
        )
    if config[text_key] != text_width:
        raise UserError(
            f"{name} takes captions of width {config[text_key]}, here {text_width}: name the model's own text encoder under `text`"
        )


def _filled(conditions: Conditions, tokens: int, dtype: torch.dtype) -> Tensor:
    """Captions padded with zeros to `tokens` tokens. Raises UserError for longer ones."""
    length = conditions.text_BLD.shape[1]
    if length > tokens:
        raise UserError(f"a caption has {length} tokens, the model takes {tokens}: set text.max_tokens: {tokens}")
    text_BLD = conditions.text_BLD.to(dtype).masked_fill(~conditions.text_mask_BL[..., None], 0.0)
    return F.pad(text_BLD, (0, 0, 0, tokens - length))


def _packed(x_BCThw: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """A latent as tokens (B, N, C x patch)."""
    b, c = x_BCThw.shape[:2]
    (t, h, w), (p_t, p_h, p_w) = token_grid(tuple(x_BCThw.shape[2:]), patch), patch
    parts = x_BCThw.reshape(b, c, t, p_t, h, p_h, w, p_w)
    return parts.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def _unpacked(tokens_BNP: Tensor, patch: tuple[int, int, int], like_BCThw: Tensor) -> Tensor:
    """The latent of these tokens, of a known shape."""
    (t, h, w), (p_t, p_h, p_w) = token_grid(tuple(like_BCThw.shape[2:]), patch), patch
    parts = tokens_BNP.unflatten(2, (-1, p_t, p_h, p_w)).unflatten(1, (t, h, w))
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like_BCThw.shape)


def _first(output: Any) -> Tensor:
    """The sample in a class's output, a tuple."""
    sample: Tensor = output[0]
    return sample
