"""Synthetic batches of videos, for measuring and estimating steps.

Legend: B samples of a micro-batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.data.loading.collate import video_batch
from mmspeed.pipelines.diffusion.predictor import Predictor
from mmspeed.protocols import Batch
from mmspeed.protocols.calls import Conditioning, latents_name
from mmspeed.shapes import Bucket, Strides

FPS = 24.0  # of synthetic clips
FURTHER_TOKENS = 64  # of captions of further encoders, such as words to be drawn


@dataclass(frozen=True)
class EncoderShapes:
    """Sizes of the outputs of a codec and a text encoder."""

    channels: int
    strides: Strides
    text_width: int


def synthetic_batch(
    inputs: EncoderShapes,
    predictor: Predictor,
    bucket: Bucket,
    latent: tuple[int, int, int],
    items: int,
    length: int,
    seed: int,
    conditioning: bool = False,
) -> Batch:
    """A batch of random latents with captions of half to all of `length` tokens, and the model's other inputs.

    conditioning: the task gives conditioning frames; here none, which costs as much.
    """
    shape_CThw = (inputs.channels, *latent)
    lengths_B = torch.tensor([length - i % 4 * (length // 8) for i in range(items)])

    def alike(name: str, *size: int) -> Tensor:
        return rng.normal(size, seed, "profile", name).expand(items, *size).contiguous()

    mask_BL, rule = torch.arange(length) < lengths_B[:, None], predictor.conditioning
    return video_batch(
        latents_BCThw=alike("latents", *shape_CThw),
        text_BLD=alike("text", length, inputs.text_width),
        text_mask_BL=mask_BL,
        weights_B=torch.ones(items),
        names=[("profile", 0, i) for i in range(items)],
        bucket=bucket,
        sources=["profile"] * items,
        pooled_BD=alike("pooled", predictor.pooled_width) if predictor.pooled_width else None,
        noise_BCThw=alike("noise", *shape_CThw),
        u_B=(torch.arange(items, dtype=torch.float64) + 0.5) / items,
        fps_B=torch.full((items,), FPS) if predictor.timed else None,
        conditioning_mask_BT=torch.zeros(items, latent[0], dtype=torch.bool) if conditioning else None,
        others=further_inputs(rule, predictor.texts, mask_BL[:, :FURTHER_TOKENS], shape_CThw, alike),
    )


def further_inputs(
    rule: Conditioning,
    texts: Mapping[str, int],
    mask_BL: Tensor,
    shape_CThw: tuple[int, ...],
    draw: Callable[..., Tensor],
) -> dict[str, Tensor]:
    """What a model takes beside latents, captions and the mask of conditioning frames, by its names in a batch.

    `texts`: widths of the captions of further encoders, whose mask is `mask_BL`; `draw(name, *size)` makes one for each sample.
    """
    inputs = {name: draw(name, mask_BL.shape[1], width) for name, width in texts.items()}
    inputs |= {f"{name}_mask": mask_BL for name in texts}
    if rule.image_size is not None:
        inputs["image"] = draw("image", *rule.image_size)
    latents = ([] if rule.how == "replace" else ["condition"]) + [latents_name(role) for role in rule.roles]
    return inputs | {name: draw(name, *shape_CThw) for name in latents}
