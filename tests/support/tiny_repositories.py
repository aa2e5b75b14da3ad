"""Tiny repositories of published pipelines with random weights, saved as diffusers saves them: one function for each family.

Patch, strides, latent channels, token limits and norms are the published ones; only widths, depths and heads are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.tiny_models import save_tiny_text_encoder, save_tiny_vae

MEANS, DEVIATIONS = [0.01 * k - 0.05 for k in range(16)], [1.0 + 0.05 * k for k in range(16)]


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random values in every tensor, also in those that its class begins with zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim > 1 else 0.02
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model


# -- Wan ----------------------------------------------------------------------------------------------------------------


def wan_transformer(**changes: Any) -> Any:
    """A tiny WanTransformer3DModel, text to video; captions of width 16."""
    from diffusers import WanTransformer3DModel

    sizes = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16,
        "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomized(WanTransformer3DModel(**{**sizes, **changes}))


def save_wan(folder: Path, shift: float = 3.0, **changes: Any) -> Path:
    """The repository of a tiny Wan 2.1 text-to-video pipeline; `changes` are the transformer's."""
    import transformers
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    parts = folder.with_name(f".{folder.name}-parts")
    save_tiny_vae(parts / "vae", "wan", z_dim=16, latents_mean=MEANS, latents_std=DEVIATIONS)
    save_tiny_text_encoder(parts / "text", "umt5")
    pipeline = WanPipeline(
        tokenizer=transformers.T5Tokenizer.from_pretrained(parts / "text"),
        text_encoder=transformers.UMT5EncoderModel.from_pretrained(parts / "text"),
        vae=AutoencoderKLWan.from_pretrained(parts / "vae"),
        transformer=wan_transformer(**changes),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
        ),
    )
    pipeline.save_pretrained(folder)
    return folder
