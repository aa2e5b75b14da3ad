"""From text entries to latents: the way that `mmspeed sample` and the videos during training share.

Legend: P prompts, C T h w latent, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.data import pad_texts
from mmspeed.device import Device
from mmspeed.pipelines.objective import Objective
from mmspeed.pipelines.samplers import guided
from mmspeed.protocol import TextEntry


@dataclass(frozen=True)
class SampleSettings:
    """How latents are sampled."""

    steps: int
    guidance: float
    sampler: str
    seed: int


@torch.no_grad()
def generate_latents(
    model: nn.Module,
    objective: Objective,
    texts: list[TextEntry],
    negative: TextEntry,
    names: list[str],
    shape_CThw: tuple[int, int, int, int],
    settings: SampleSettings,
    device: Device,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Latents (P, C, T, h, w) float32 of P texts.

    The noise of each is drawn by its name (law 1), so a prompt's video does not depend on which others are sampled with it.
    """
    to = device.torch_device
    text_PLD, mask_PL = (tensor.to(to) for tensor in pad_texts(texts))
    negative_PLD, negative_PL = (tensor.to(to) for tensor in pad_texts([negative] * len(texts)))
    noise_PCThw = torch.stack([rng.normal(shape_CThw, settings.seed, "sample", name) for name in names]).to(to)

    def predict(x_BCThw: Tensor, t_B: Tensor) -> Tensor:
        return model(x_BCThw, t_B, text_PLD, mask_PL).float()

    def predict_negative(x_BCThw: Tensor, t_B: Tensor) -> Tensor:
        return model(x_BCThw, t_B, negative_PLD, negative_PL).float()

    was_training = model.training
    model.eval()
    try:
        both = guided(predict, predict_negative, settings.guidance)
        return objective.sample(both, noise_PCThw, settings.steps, settings.sampler, on_step=on_step)
    finally:
        model.train(was_training)
