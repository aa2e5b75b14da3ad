"""Diffusers' video transformers, tiny and with random weights, and inputs of odd lengths for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _wan(**changes: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**{
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32, **changes,
    })  # fmt: skip


def _wan_inputs(frames: int = 5, text: int = 7, per_token: bool = False, seed: int = 1) -> Inputs:
    g = _generator(seed)
    timestep = torch.rand(2, generator=g) * 1000
    if per_token:
        timestep = torch.rand(2, frames * 3 * 3, generator=g) * 1000
    return {
        "hidden_states": torch.randn(2, 4, frames, 6, 6, generator=g),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
    }


def _wan_vace(**changes: Any) -> nn.Module:
    from diffusers import WanVACETransformer3DModel

    return WanVACETransformer3DModel(**{
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 3, "rope_max_seq_len": 32, "vace_layers": (0, 2),
        "vace_in_channels": 72, **changes,
    })  # fmt: skip


def _wan_vace_inputs(frames: int = 5, text: int = 7, seed: int = 1) -> Inputs:
    control = torch.randn(2, 72, frames, 6, 6, generator=_generator(seed + 1))
    return {**_wan_inputs(frames, text, seed=seed), "control_hidden_states": control}


def _chronoedit(**changes: Any) -> nn.Module:
    from diffusers import ChronoEditTransformer3DModel

    return ChronoEditTransformer3DModel(**{
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
        "image_dim": None, "added_kv_proj_dim": None, **changes,
    })  # fmt: skip


def _ltx(**changes: Any) -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(**{
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32,
        "num_layers": 2, "caption_channels": 8, **changes,
    })  # fmt: skip


def _ltx_inputs(frames: int = 5, text: int = 7, per_token: bool = False, seed: int = 1) -> Inputs:
    g = _generator(seed)
    tokens = frames * 3 * 3
    mask = torch.ones(2, text, dtype=torch.int64)
    mask[1, text // 2 :] = 0
    return {
        "hidden_states": torch.randn(2, tokens, 4, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "timestep": torch.rand((2, tokens) if per_token else (2,), generator=g) * 1000,
        "encoder_attention_mask": mask,
        "num_frames": frames,
        "height": 3,
        "width": 3,
    }


def _cogvideox(**changes: Any) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(**{
        "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
        "text_embed_dim": 8, "num_layers": 2, "sample_width": 6, "sample_height": 6, "sample_frames": 17,
        "max_text_seq_length": 7, "use_rotary_positional_embeddings": True, **changes,
    })  # fmt: skip


def _cogvideox_inputs(frames: int = 5, text: int = 7, rotary: bool = True, seed: int = 1) -> Inputs:
    g = _generator(seed)
    inputs: Inputs = {
        "hidden_states": torch.randn(2, frames, 4, 6, 6, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "timestep": torch.randint(0, 1000, (2,), generator=g),
    }
    if rotary:
        angles = torch.rand(frames * 3 * 3, 8, generator=g).repeat_interleave(2, dim=1)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return inputs


def _hunyuan(**changes: Any) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(**{
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 8, "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4), **changes,
    })  # fmt: skip


def _hunyuan_inputs(frames: int = 5, text: int = 7, seed: int = 1) -> Inputs:
    g = _generator(seed)
    mask = torch.ones(2, text, dtype=torch.int64)
    mask[0, 2:] = 0  # whole parts of some ranks are padding
    return {
        "hidden_states": torch.randn(2, 4, frames, 6, 6, generator=g),
        "timestep": torch.rand(2, generator=g) * 1000,
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(2, 8, generator=g),
        "guidance": torch.full((2,), 6.0),
    }


def _hunyuan15(**changes: Any) -> nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(**{
        "in_channels": 9, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 2,
        "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 2, "text_embed_dim": 8, "text_embed_2_dim": 8,
        "image_embed_dim": 8, "rope_axes_dim": (2, 4, 4), "task_type": "t2v", **changes,
    })  # fmt: skip


def _hunyuan15_inputs(frames: int = 5, text: int = 7, seed: int = 1) -> Inputs:
    g = _generator(seed)
    mask = torch.ones(2, text, dtype=torch.int64)
    mask[0, text // 2 + 1 :] = 0
    glyphs = torch.ones(2, 5, dtype=torch.int64)
    glyphs[1, 1:] = 0
    return {
        "hidden_states": torch.randn(2, 9, frames, 6, 6, generator=g),
        "timestep": torch.rand(2, generator=g) * 1000,
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": torch.randn(2, 5, 8, generator=g),
        "encoder_attention_mask_2": glyphs,
        "image_embeds": torch.zeros(2, 3, 8),
    }


def _mochi(**changes: Any) -> nn.Module:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(**{
        "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 2, "pooled_projection_dim": 16, "in_channels": 4,
        "text_embed_dim": 8, "time_embed_dim": 16, **changes,
    })  # fmt: skip


def _mochi_inputs(frames: int = 5, text: int = 7, seed: int = 1) -> Inputs:
    g = _generator(seed)
    mask = torch.ones(2, text, dtype=torch.bool)
    mask[0, text // 2 :] = False
    return {
        "hidden_states": torch.randn(2, 4, frames, 6, 6, generator=g),
        "timestep": torch.rand(2, generator=g) * 1000,
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "encoder_attention_mask": mask,
    }


def _qwen(**changes: Any) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(**{
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 10, "num_attention_heads": 4,
        "joint_attention_dim": 8, "axes_dims_rope": (2, 4, 4), **changes,
    })  # fmt: skip


def _qwen_inputs(text: int = 7, seed: int = 1) -> Inputs:
    g = _generator(seed)
    mask = torch.ones(2, text, dtype=torch.int64)
    mask[1, text // 2 :] = 0
    return {
        "hidden_states": torch.randn(2, 45, 16, generator=g),
        "timestep": torch.rand(2, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "encoder_hidden_states_mask": mask,
        "img_shapes": [[(1, 5, 9)]] * 2,
    }


def _flux(**changes: Any) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(**{
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 10, "num_attention_heads": 4,
        "joint_attention_dim": 8, "pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (2, 4, 4), **changes,
    })  # fmt: skip


def _flux_inputs(text: int = 7, seed: int = 1) -> Inputs:
    g = _generator(seed)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(9.0))
    return {
        "hidden_states": torch.randn(2, 45, 16, generator=g),
        "timestep": torch.rand(2, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 8, generator=g),
        "pooled_projections": torch.randn(2, 8, generator=g),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.full((2,), 3.5),
    }


# name -> (a model's maker, its changes, its inputs' maker, their changes)
CASES: dict[str, tuple[Callable[..., nn.Module], Inputs, Callable[..., Inputs], Inputs]] = {
    "wan": (_wan, {}, _wan_inputs, {}),
    "wan, a timestep a token": (_wan, {}, _wan_inputs, {"per_token": True}),
    "wan vace": (_wan_vace, {}, _wan_vace_inputs, {}),
    "ltx": (_ltx, {}, _ltx_inputs, {}),
    "ltx, a timestep a token": (_ltx, {}, _ltx_inputs, {"per_token": True}),
    "cogvideox": (_cogvideox, {}, _cogvideox_inputs, {}),
    "cogvideox, sincos": (_cogvideox, {"use_rotary_positional_embeddings": False}, _cogvideox_inputs, {"rotary": False}),
    "chronoedit, by its own declaration": (_chronoedit, {}, _wan_inputs, {}),
    "hunyuan": (_hunyuan, {}, _hunyuan_inputs, {}),
    "hunyuan, first frame given": (_hunyuan, {"image_condition_type": "token_replace"}, _hunyuan_inputs, {}),
    "hunyuan 1.5": (_hunyuan15, {}, _hunyuan15_inputs, {}),
    "mochi": (_mochi, {}, _mochi_inputs, {}),
    "qwen, images": (_qwen, {}, _qwen_inputs, {}),
    "flux, images": (_flux, {}, _flux_inputs, {}),
}  # fmt: skip


def make_model(case: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The case's model; the same numbers for the same seed."""
    maker, own, _, _ = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker(**{**own, **changes}).train()
        for name, parameter in model.named_parameters():
            if name == "pos_frequencies":  # zeros in a new model of Mochi
                nn.init.normal_(parameter)
        return model


def make_inputs(case: str, **changes: Any) -> Inputs:
    """Keyword arguments of the case's model."""
    _, _, maker, own = CASES[case]
    return maker(**{**own, **changes})


def loss_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """A loss in which every output token counts differently."""
    out = model(**inputs, return_dict=False)[0]
    return (out.float() - torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean()
