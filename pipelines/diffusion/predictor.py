"""Predictions of diffusion transformers, and their cost: of our own models, and of published classes by their calls.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mmspeed.config.schema import Config, DdpmConfig, FlowConfig, ObjectiveConfig
from mmspeed.data.loading.collate import pad_other_texts, pad_texts, pooled_vectors
from mmspeed.errors import UserError
from mmspeed.models.diffusers.loading import keep_float32
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.families import call_for, class_name, family_in
from mmspeed.models.families.base import DescribesAttention
from mmspeed.models.sections import FamilyCounts, arguments_of
from mmspeed.parallel import token_layout, unwrap
from mmspeed.protocols import (
    Batch,
    BlockWork,
    CountsFlops,
    DiffusionModel,
    Inputs,
    TextEntry,
    Work,
    check_model,
)
from mmspeed.protocols.calls import Conditioning, Conditions, CountsWork, ModelCall, TakesConditioning, TakesTexts
from mmspeed.protocols.model import lacking_members
from mmspeed.protocols.plan import Split, plan_of
from mmspeed.shapes import Bucket, Strides

Latent = tuple[int, int, int]
# tensors of the video task's batches; others are further inputs of the model, by name
OWN_TENSORS = ("latents", "text", "text_mask", "text_pooled", "noise", "fps", "loss_mask", "quantiles")
BLOCK_LISTS = (
    "depth",
    "num_layers",
    "num_single_layers",
)  # numbers of blocks among a class's arguments, in the order of their calls
STEPS_OF_V = 1000  # of published models that predict v


class Predictor(CountsFlops, Protocol):
    """The predictions of models of one kind; it holds none of those that train."""

    @property
    def timed(self) -> bool:
        """True for a model that takes the frames per second of each clip."""
        ...

    @property
    def pooled_width(self) -> int:
        """Width of the vector of a whole caption that the model takes; 0: it takes none."""
        ...

    @property
    def conditioning(self) -> Conditioning:
        """The ways in which the model takes conditioning frames."""
        ...

    @property
    def texts(self) -> Mapping[str, int]:
        """Widths of the captions of further encoders that the model takes, by name."""
        ...

    def arguments(self, model: nn.Module, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> Inputs:
        """The arguments of `model` for a prediction. `t_B` is float32 in [0, 1], on the device of the latent."""
        ...

    def prediction(self, output: Any, x_BCThw: Tensor) -> Tensor:
        """The prediction in a model's output, of the shape of `x_BCThw`."""
        ...

    def work(self, latent: tuple[int, int, int], text_tokens: int) -> Work:
        """Work of the forward pass of one sample by kind, as far as it is known, if all attention were dense."""
        ...

    def notes(self, latents: Mapping[Bucket, Latent], config: Config) -> tuple[list[str], list[str]]:
        """Lines and warnings at the start of a run of `config`, about attention over latents of these buckets."""
        ...

    def guided(self, scale: float) -> tuple[Predictor, float]:
        """(the predictor, the scale of classifier-free guidance) for a wanted guidance: a guidance-distilled model is given it, and then
        needs no second prediction.
        """
        ...


@dataclass(frozen=True)
class OwnPredictor:
    """The predictor of a model that takes latents, times and captions as they are, and counts its own work."""

    bare: DiffusionModel
    timed: bool = False
    pooled_width: int = 0

    @property
    def conditioning(self) -> Conditioning:
        return Conditioning()

    @property
    def texts(self) -> Mapping[str, int]:
        return {}

    def arguments(self, model: nn.Module, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> Inputs:
        """Latents, times (of frames, where some are given) and captions as they are."""
        return Inputs(positional=(x_BCThw, conditions.times_of(t_B), conditions.text_BLD, conditions.text_mask_BL))

    def prediction(self, output: Any, x_BCThw: Tensor) -> Tensor:
        return cast(Tensor, output)

    def guided(self, scale: float) -> tuple[Predictor, float]:
        return self, scale

    def tokens(self, latent: tuple[int, int, int]) -> int:
        return self.bare.tokens(latent)

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        return self.bare.flops(latent, text_tokens)

    def work(self, latent: tuple[int, int, int], text_tokens: int) -> Work:
        return Work(products=float(self.flops(latent, text_tokens)))

    def notes(self, latents: Mapping[Bucket, Latent], config: Config) -> tuple[list[str], list[str]]:
        return [], []


@dataclass(frozen=True)
class FamilyPredictor(FamilyCounts):
    """The predictor of a class, by its call. name: of the class; seeded: True for one whose weights begin from a seed."""

    name: str
    seeded: bool = False

    @property
    def timed(self) -> bool:
        return self.call.timed

    @property
    def pooled_width(self) -> int:
        return self.call.pooled_width(self.config)

    @property
    def conditioning(self) -> Conditioning:
        return self.call.conditioning(self.config) if isinstance(self.call, TakesConditioning) else Conditioning()

    @property
    def texts(self) -> Mapping[str, int]:
        return self.call.texts(self.config) if isinstance(self.call, TakesTexts) else {}

    def arguments(self, model: nn.Module, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> Inputs:
        conditions = conditions.with_text_of(least_text(model))
        return Inputs(self.call.call(self.config, x_BCThw, t_B, conditions))

    def prediction(self, output: Any, x_BCThw: Tensor) -> Tensor:
        return self.call.prediction(self.config, output, x_BCThw)

    def work(self, latent: tuple[int, int, int], text_tokens: int) -> Work:
        if isinstance(self.call, CountsWork):
            return self.call.work(self.config, latent, text_tokens)
        return Work(products=float(self.flops(latent, text_tokens)))

    def block_work(self, latent: tuple[int, int, int], text_tokens: int) -> BlockWork:
        """Work of each block of a sample's forward pass: what it adds to that of a model with those before it alone."""
        lists = {key: self.config[key] for key in BLOCK_LISTS if key in self.config}
        none = {**self.config, **dict.fromkeys(lists, 0)}
        models = ([replace(self, config={**none, key: n}) for n in range(count + 1)] for key, count in lists.items())
        works = ([model.work(latent, text_tokens).matmul for model in each] for each in models)
        return BlockWork([more - less for each in works for less, more in pairwise(each)])

    def notes(self, latents: Mapping[Bucket, Latent], config: Config) -> tuple[list[str], list[str]]:
        if not isinstance(self.call, DescribesAttention):
            return [], []
        return self.call.sparse_notes(self.config, latents, config)

    def guided(self, scale: float) -> tuple[Predictor, float]:
        call = with_guidance(self.call, self.config, scale)
        return (self, scale) if call is None else (replace(self, call=call), 1.0)


def predict(predictor: Predictor, model: nn.Module, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> Tensor:
    """The prediction of a model, of the shape of `x_BCThw`."""
    return predictor.prediction(predictor.arguments(model, x_BCThw, t_B, conditions).call(model), x_BCThw)


def with_guidance(call: ModelCall, config: Mapping[str, Any], scale: float) -> ModelCall | None:
    """The call that gives a guidance-distilled model a scale; None for a model that takes none.

    `config`: the arguments that the model was made with.
    """
    if not config.get("guidance_embeds") or not is_dataclass(call) or not hasattr(call, "guidance"):
        return None
    distilled: ModelCall = replace(call, guidance=scale)
    return distilled


def make_predictor(
    model: nn.Module, objective: ObjectiveConfig, channels: int, text_width: int, call: ModelCall | None = None
) -> Predictor:
    """The predictor of a model. A published class without a plan gets its known plan, in place.

    `call`: the call of an unknown class; None: found by the class's name. Raises UserError for a model that is no diffusion model, whose
    sizes differ from the data's, or that was trained to predict another quantity than the objective's.
    """
    if call is None and class_name(model) is None:
        if lacking_members(model, DiffusionModel):
            _refuse(model)
        return OwnPredictor(cast(DiffusionModel, model))
    call, family = call or call_for(model), family_in(type(model))
    config = arguments_of(model)
    name = class_name(model) or type(model).__name__
    _check_objective(name, call, objective)
    call.check(config, channels, text_width)
    declare_known_plan(model)
    if objective.guidance is not None:
        distilled = with_guidance(call, config, objective.guidance)
        if distilled is None:
            raise UserError(f"objective.guidance: {name} takes no guidance here: leave it out")
        call = distilled
    return FamilyPredictor(call, config, name, family is not None and family.seeded)


def prepare_training(model: nn.Module) -> None:
    """Prepare a published model for training, in place: `from_pretrained` leaves it in eval mode, and maybe in half precision."""
    model.train()
    keep_float32(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _refuse(model: nn.Module) -> None:
    """Raises UserError that names the members that a model lacks, and the known classes."""
    try:
        check_model(model, DiffusionModel, "video")
    except UserError as error:
        try:
            call_for(model)
        except UserError as unknown:
            raise UserError(f"{error}. {unknown}") from None
        raise


def _check_objective(name: str, call: ModelCall, objective: ObjectiveConfig) -> None:
    if call.predicts == "any":
        return
    if call.predicts == "velocity":
        if not isinstance(objective, FlowConfig):
            raise UserError(
                f"objective.kind is {objective.kind}: {name} predicts the velocity of a flow; use objective: {{kind: flow}}"
            )
        return
    right = "objective: {kind: ddpm, prediction: v, steps: 1000}"
    if not isinstance(objective, DdpmConfig):
        raise UserError(f"objective.kind is {objective.kind}: {name} predicts v of a denoising diffusion; use {right}")
    if objective.prediction != "v" or objective.steps != STEPS_OF_V:
        raise UserError(
            f"objective.prediction is {objective.prediction} and objective.steps {objective.steps}: {name} predicts v at one of "
            f"{STEPS_OF_V} steps; use {right}"
        )


def least_text(model: nn.Module) -> int:
    """Tokens that captions must have so that each process of the model's layout gets those that its plan asks for."""
    bare = unwrap(model)
    plan = plan_of(bare)
    if plan is None:
        return 0
    splits = [split for inputs in plan.inputs.values() for split in inputs.values() if isinstance(split, Split)]
    least = max((split.least for split in splits if split.sequence == "text"), default=0)
    return least * token_layout(bare).size if least else 0


def conditions_of(batch: Batch, strides: Strides | None) -> Conditions:
    """The conditions of a batch's predictions. Tensors of names that the video task does not know itself are passed on by name."""
    tensors = batch.tensors
    named = {name: tensor for name, tensor in tensors.items() if name not in OWN_TENSORS}
    return Conditions(
        tensors["text"], tensors["text_mask"], tensors.get("text_pooled"), tensors.get("fps"), strides, named
    )


def conditions_of_texts(
    texts: Sequence[TextEntry], device: torch.device, fps: float, strides: Strides | None
) -> Conditions:
    """The conditions of the prediction for captions of one batch, on a device."""
    text_BLD, mask_BL = (tensor.to(device) for tensor in pad_texts(texts))
    pooled_BD = pooled_vectors(texts)
    pooled_BD = None if pooled_BD is None else pooled_BD.to(device)
    named = {name: tensor.to(device) for name, tensor in pad_other_texts(texts).items()}
    return Conditions(text_BLD, mask_BL, pooled_BD, torch.full((len(texts),), fps, device=device), strides, named)
