"""Small configs of diffusers' video transformers, which keep the class, its heads, and all else that decides how it is split.

A model of such a config runs in a moment on a laptop; layouts are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmspeed.models.diffusers.calls import CogVideoXCall, HunyuanVideoCall, LtxCall, WanCall

Config = Mapping[str, Any]  # the arguments of a class's constructor
Latent = tuple[int, int, int]
MOST_BLOCKS = 2  # of each list
WIDTH_OF_TIMES = 16


@dataclass(frozen=True)
class SmallSizes:
    """Sizes of a small model and of its inputs.

    Args:
        channels: of latents.
        text_width, text_tokens: of captions.
        latent: (T, h, w) of a video, for classes with positions of their own size.
        hidden: (a layer's size, the least) -> a small size that divides over processes as that one does.
    """

    channels: int
    text_width: int
    text_tokens: int
    latent: Latent
    hidden: Callable[[int, int], int]


@dataclass(frozen=True)
class SmallClass:
    """Rules for small models of a class. `patch`: that of a config, along time, height and width; `head`: channels of an attention head."""

    patch: Callable[[Config], Latent]
    head: int
    own: Callable[[Config, SmallSizes, int], dict[str, Any]]  # (config, sizes, width of the small model)

    def config(self, config: Config, sizes: SmallSizes) -> dict[str, Any]:
        """The small model's arguments, from those of a large one."""
        width = self.head * config["num_attention_heads"]
        known = {name: _plain(value) for name, value in config.items()}
        lists = [name for name in ("num_layers", "num_single_layers", "num_refiner_layers") if name in known]
        blocks: dict[str, Any] = {name: min(known[name], MOST_BLOCKS) for name in lists}
        return {**known, "attention_head_dim": self.head, **blocks, **self.own(config, sizes, width)}


def _wan(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **_channels(config, sizes.channels),
        "text_dim": sizes.text_width,
        "freq_dim": WIDTH_OF_TIMES,
        "ffn_dim": sizes.hidden(config["ffn_dim"], 2 * width),
    }


def _ltx(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    own = config["num_attention_heads"] * config["attention_head_dim"]
    cross = config["cross_attention_dim"]
    return {
        **_channels(config, sizes.channels * math.prod(LtxCall.patch(config))),
        "caption_channels": sizes.text_width,
        "cross_attention_dim": width if cross == own else cross,
    }


def _cogvideox(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    t, h, w = sizes.latent
    return {
        **_channels(config, sizes.channels),
        "text_embed_dim": sizes.text_width,
        "max_text_seq_length": sizes.text_tokens,
        "time_embed_dim": WIDTH_OF_TIMES,
        "ofs_embed_dim": WIDTH_OF_TIMES if config["ofs_embed_dim"] else None,
        "sample_frames": 1 + (t - 1) * config["temporal_compression_ratio"],
        "sample_height": h,
        "sample_width": w,
        "dropout": 0.0,  # each process draws its own
    }


def _hunyuan_video(config: Config, sizes: SmallSizes, width: int) -> dict[str, Any]:
    return {
        **_channels(config, sizes.channels),
        "text_embed_dim": sizes.text_width,
        "pooled_projection_dim": sizes.text_width,
        "rope_axes_dim": (4, 4, 4),
    }


SMALL: Mapping[str, SmallClass] = {
    "WanTransformer3DModel": SmallClass(WanCall.patch, 12, _wan),
    "LTXVideoTransformer3DModel": SmallClass(LtxCall.patch, 12, _ltx),
    "CogVideoXTransformer3DModel": SmallClass(CogVideoXCall.patch, 16, _cogvideox),
    "HunyuanVideoTransformer3DModel": SmallClass(HunyuanVideoCall.patch, 12, _hunyuan_video),
}


def _channels(config: Config, channels: int) -> dict[str, Any]:
    """Numbers of input and output channels; a model with more inputs than outputs keeps more."""
    inputs, outputs = config["in_channels"], config["out_channels"] or config["in_channels"]
    return {"in_channels": channels + (inputs != outputs), "out_channels": channels}


def _plain(value: Any) -> Any:
    """The argument as the class takes it, from one that was read from JSON."""
    return tuple(value) if isinstance(value, list) else value
