"""Latents from text entries, for `mmspeed sample` and for videos during training.

Legend: P prompts, C T h w latent, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.sparse.module import warm_plans
from mmspeed.device import Device
from mmspeed.pipelines.diffusion.conditioning_frames import held, holding
from mmspeed.pipelines.diffusion.experts import OtherExpert
from mmspeed.pipelines.diffusion.objective import Objective
from mmspeed.pipelines.diffusion.predictor import Predictor, conditions_of_texts, predict
from mmspeed.pipelines.diffusion.samplers import OnStep, Predict, guided, mixed
from mmspeed.pipelines.inference.conditioning_media import ConditioningLatents
from mmspeed.protocols import TextEntry
from mmspeed.protocols.calls import Conditions
from mmspeed.shapes import Strides


@dataclass(frozen=True)
class SampleSettings:
    """The settings for sampling latents."""

    steps: int
    guidance: float
    sampler: str
    seed: int
    rescale: float = 0.0  # of guidance
    guidance_2: float | None = None  # of the expert of low noise; None: `guidance`


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
    *,
    predictor: Predictor,
    fps: float = 24.0,
    strides: Strides | None = None,
    other: OtherExpert | None = None,
    conditioning: ConditioningLatents | None = None,
) -> Tensor:
    """Latents (P, C, T, h, w) float32 of P texts, sampled one after the other: the memory of one video.

    The noise of each is drawn by its name (law 1), so a prompt's video does not depend on the other prompts.
    `on_step(done, total)` counts the steps of all texts. objective: that of the videos' size (`sized`). predictor: of the model's
    predictions; fps, strides: for a model that takes them. other: the expert that predicts at the times that are not the model's.
    conditioning: of each video.
    """
    models = [model] if other is None else [model, other.model]
    was_training = [each.training for each in models]
    for each in models:
        each.eval()
    total = settings.steps * len(texts)
    latents = []
    try:
        for place, (text, name) in enumerate(zip(texts, names, strict=True)):
            noise_1CThw = rng.normal(shape_CThw, settings.seed, "sample", name)[None]

            def tell(done: int, steps: int, place: int = place) -> None:
                if on_step is not None:
                    on_step(place * settings.steps + done, total)

            latents.append(
                sample_together(
                    model, objective, [text], [negative], noise_1CThw, settings, device, tell, predictor, fps, strides,
                    conditioning, other,
                )
            )  # fmt: skip
    finally:
        for each, training in zip(models, was_training, strict=True):
            each.train(training)
    return torch.cat(latents)


@torch.no_grad()
def sample_together(
    model: nn.Module,
    objective: Objective,
    texts: Sequence[TextEntry],
    negatives: Sequence[TextEntry],
    noise_PCThw: Tensor,
    settings: SampleSettings,
    device: Device,
    on_step: OnStep | None,
    predictor: Predictor,
    fps: float = 24.0,
    strides: Strides | None = None,
    conditioning: ConditioningLatents | None = None,
    other: OtherExpert | None = None,
) -> Tensor:
    """Latents (P, C, T, h, w) float32 of P texts in one batch, from their noise; the model is in eval mode.

    negatives: the text to steer away from, of each. conditioning: what they are given beside it.
    other: the expert that predicts at the times that are not the model's. A model whose attention keeps clusters between steps takes one
    text at a time.
    """
    # plans of sparse attention begin with those of the step before, by condition
    with ExitStack() as stack:
        uses = {
            id(each): stack.enter_context(warm_plans(each))
            for each in (model, *([] if other is None else [other.model]))
        }
        both = [conditions_of_texts(each, device.torch_device, fps, strides) for each in (texts, negatives)]
        conditioning = None if conditioning is None else conditioning.to(device.torch_device)
        if conditioning is not None:
            both = [replace(each, named={**each.named, **conditioning.named}) for each in both]
        family = objective.family if settings.sampler == "family" else None

        def guided_by(expert: nn.Module, guidance: float) -> Predict:
            own, scale = predictor.guided(guidance)
            use = uses[id(expert)]
            return guided(
                _predictor(expert, own, both[0], lambda: use("text")),
                _predictor(expert, own, both[1], lambda: use("negative")),
                scale,
                settings.rescale,
                mixed if family is None else family.sampling.guided,
            )

        if other is None:
            chosen = guided_by(model, settings.guidance)
        else:
            # as in the official pipeline, no guidance of the first expert is none of both
            low = settings.guidance if settings.guidance_2 is None or settings.guidance == 1 else settings.guidance_2
            own_scale, other_scale = (low, settings.guidance) if other.noise == "high" else (settings.guidance, low)
            chosen = other.switched(guided_by(model, own_scale), guided_by(other.model, other_scale))
        noise_PCThw = noise_PCThw.to(device.torch_device)
        if conditioning is not None:
            noise_PCThw = conditioning.begun(noise_PCThw)
        clean_PCThw = None if conditioning is None else conditioning.held_PCThw
        if conditioning is None or clean_PCThw is None:
            return objective.sample(chosen, noise_PCThw, settings.steps, settings.sampler, on_step=on_step)
        mask_PT = conditioning.named["conditioning_mask"]
        chosen = holding(chosen, clean_PCThw, mask_PT)
        video_PCThw = objective.sample(chosen, noise_PCThw, settings.steps, settings.sampler, on_step=on_step)
        return held(video_PCThw, clean_PCThw, mask_PT)


def _predictor(model: nn.Module, predictor: Predictor, conditions: Conditions, before: Callable[[], None]) -> Predict:
    """The prediction function of the model under one caption; `before()` runs before each call."""

    def predicted(x_1CThw: Tensor, t_1: Tensor) -> Tensor:
        before()
        return predict(predictor, model, x_1CThw, t_1, conditions).float()

    return predicted
