"""Find the weights of a published model that its training never reaches, by a small model of the class, and freeze those the family lists.

DDP waits for a gradient of every trainable tensor, and AdamW decays those that nothing trains. A new model has tensors of zeros, which
hide gradients of others; so the small model has random values in all of its tensors.

Legend: B samples, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.errors import UserError
from mmspeed.models.adapters import is_adapter
from mmspeed.models.families import FAMILIES, class_name, family_in
from mmspeed.models.families.base import SmallSizes, matching
from mmspeed.pipelines.domains.video.synthetic import further_inputs
from mmspeed.protocols import Conditions, ModelCall
from mmspeed.protocols.calls import Conditioning, TakesConditioning, TakesTexts
from mmspeed.shapes import Strides

CHANNELS, TEXT_WIDTH, TEXT_TOKENS, SAMPLES = 4, 16, 7, 2


@dataclass(frozen=True)
class Unreached:
    """Trainable tensors of a small model without gradient, and with one of zeros alone."""

    without: tuple[str, ...]
    zero: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return *self.without, *self.zero


def unreached(kind: type[nn.Module], config: Mapping[str, Any], call: ModelCall) -> Unreached:
    """The tensors that a step of a small model of a class leaves untouched. `config`: the large model's arguments; `call`: its call."""
    family = family_in(kind)
    assert family is not None  # `freeze_unused` leaves others alone
    small = family.small_class
    t, h, w = small.patch(config)
    for latent in ((2 * t, 2 * h, 2 * w), (t, 2 * h, 2 * w)):  # the second for classes of images
        sizes = SmallSizes(CHANNELS, TEXT_WIDTH, TEXT_TOKENS, latent, lambda size, least: min(size, least))
        arguments = small.config(config, sizes)
        if _takes(call, arguments, latent):
            break
    call = small.call(call, TEXT_TOKENS)
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = kind(**arguments).train()
        x_BCThw = torch.randn(SAMPLES, CHANNELS, *latent, generator=g)
        target_BCThw = torch.randn(x_BCThw.shape, generator=g)
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim > 1 else 0.02
            parameter.data = spread * torch.randn(parameter.shape, generator=g) + (parameter.ndim == 1)
        inputs = call.call(
            arguments, x_BCThw, torch.rand(SAMPLES, generator=g), _conditions(call, arguments, g, latent)
        )
        prediction_BCThw = call.prediction(arguments, model(**inputs), x_BCThw)
        (prediction_BCThw - target_BCThw).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Unreached(
        tuple(name for name, gradient in gradients.items() if gradient is None),
        tuple(name for name, gradient in gradients.items() if gradient is not None and not gradient.any()),
    )


def freeze_unused(model: nn.Module, config: Mapping[str, Any], call: ModelCall) -> list[str]:
    """Freeze the weights that the model's family lists as unused in this training, in place; returns their names.

    Raises UserError where other trainable weights get no gradient, and for adapters that the family lists. A class that no family has is left as it is.
    """
    name = class_name(model)
    if name is None:
        return []
    kind = [own for own in type(model).__mro__ if own.__name__ == name][-1]  # below mixins of the same name
    parameters, missed = dict(model.named_parameters()), unreached(kind, config, call)
    own = list(parameters)
    patterns = FAMILIES[name].unused
    listed = set(matching(patterns, missed.names))
    others = [
        each for each in (_in_large(small, own) for small in missed.names if small not in listed)
        if each in parameters and parameters[each].requires_grad
    ]  # fmt: skip
    if others:
        raise UserError(
            f"{name}: {len(others)} trainable tensors get no gradient in this training, first {others[0]}; freeze them, or name them in "
            f"`unused` of the family {FAMILIES[name].name}"
        )
    missing = [pattern for pattern in patterns if matching([pattern], missed.names)]
    frozen = [each for each in matching(missing, own) if parameters[each].requires_grad]
    if adapted := [each.partition(".lora_")[0] for each in frozen if is_adapter(each)]:
        raise UserError(
            f"model.adapter.targets: this training never reaches {adapted[0]} of {name}; name layers that it reaches"
        )
    freeze(model, frozen)
    return frozen


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze the named parameters, in place."""
    parameters = dict(model.named_parameters())
    for name in names:
        if name in parameters:
            parameters[name].requires_grad_(False)


def unused_lines(names: Sequence[str]) -> list[str]:
    """A line about the weights that stay frozen; none where all train."""
    if not names:
        return []
    return [f"{len(names)} tensors that this training never reaches stay frozen: {', '.join(names)}"]


def _takes(call: ModelCall, config: Mapping[str, Any], latent: tuple[int, int, int]) -> bool:
    """True where the model takes a latent of this size."""
    try:
        call.tokens(config, latent)
    except ValueError:
        return False
    return True


def _conditions(
    call: ModelCall, config: Mapping[str, Any], g: torch.Generator, latent: tuple[int, int, int]
) -> Conditions:
    """Random conditions of the samples, all of whose tokens count."""

    def normal(*size: int) -> Tensor:
        return torch.randn(SAMPLES, *size, generator=g)

    mask_BL = torch.ones(SAMPLES, TEXT_TOKENS, dtype=torch.bool)
    rule = call.conditioning(config) if isinstance(call, TakesConditioning) else Conditioning()
    texts = call.texts(config) if isinstance(call, TakesTexts) else {}
    named = further_inputs(rule, texts, mask_BL, (CHANNELS, *latent), lambda _, *size: normal(*size))
    if rule.how != "replace":
        named["conditioning_mask"] = torch.ones(SAMPLES, latent[0], dtype=torch.bool)
    pooled = call.pooled_width(config)
    return Conditions(
        normal(TEXT_TOKENS, TEXT_WIDTH),
        mask_BL,
        normal(pooled) if pooled else None,
        torch.full((SAMPLES,), 24.0),
        Strides(4, 8),
        named,
    )


def _in_large(name: str, names: Sequence[str]) -> str:
    """The name of a small model's tensor in the large one: the last block of each list is the last."""
    parts = name.split(".")
    for place, part in enumerate(parts[1:], 1):
        if part.isdigit():
            before = ".".join(parts[:place])
            numbers = [each[len(before) + 1 :].partition(".")[0] for each in names if each.startswith(f"{before}.")]
            small_last = int(part) > 0
            if small_last and (known := [int(number) for number in numbers if number.isdigit()]):
                parts[place] = str(max(known)) if max(known) > 1 else part
    return ".".join(parts)
