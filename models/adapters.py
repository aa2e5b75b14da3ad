"""Low-rank adapters (LoRA: Hu et al. 2021) of peft on a model without memory, and the weights that such a model begins with.

The base stays frozen. A layer's frozen weight has the name `<layer>.base_layer.weight`, its adapter `<layer>.lora_A.default.weight` (rank,
inputs) and `<layer>.lora_B.default.weight` (outputs, rank).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.errors import UserError, nearest
from mmspeed.models.frozen_linear import FrozenLinear, freeze_linears, quantised
from mmspeed.models.weights import quiet
from mmspeed.protocols import (
    Part,
    WeightSource,
    blocks_of,
    declare_source,
    parts_of,
    plan_of,
    source_of,
    stays_float32,
)
from mmspeed.protocols.plan import PreparesInput, modules_like, named_like
from mmspeed.rng import symmetric

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

NAME = "default"  # peft's name of an adapter
KEY = "model.adapter.targets"
REGIONS = {"attention": ("attention", "cross_attention"), "attention+mlp": ("attention", "cross_attention", "mlp")}
INSIDE = ".base_layer"  # before the last part of the name of a frozen weight under an adapter


def adapt(
    model: nn.Module, adapter: AdapterConfig | None, base: BaseConfig, unused: Collection[str] = frozenset()
) -> nn.Module:
    """Freeze a model and put adapters beside its linear layers, in place; it has its plan and no memory. Returns it.

    unused: parameters that training never reaches, which get no adapter. Without an adapter the model stays as it is. Raises UserError for
    targets that no layer has, or that are no plain linear layers.
    """
    if adapter is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    names = target_layers(model, adapter.targets, unused)
    model.requires_grad_(False)
    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha_or_rank,  # type: ignore[arg-type]  # whole numbers are not needed
        use_rslora=adapter.rslora,
        target_modules=names,
    )
    with quiet():
        inject_adapter_in_model(settings, model, NAME, low_cpu_mem_usage=True)
    for layer in adapted_layers(model):
        # autocast rounds their inputs: casts to float32 before that would leave the same numbers, and copies of each input
        vars(layer)["cast_input_dtype_enabled"] = False
    if base.dtype in ("int8", "float8"):
        for name, block in blocks_of(model):
            freeze_linears(block, base.dtype, partial(_stays, model, name))
    if base.dtype != "float32":
        make_frozen_half(model)
    source = source_of(model)
    if source is not None:
        declare_source(model, AdaptedWeights(source, model))
    return model


def _stays(model: nn.Module, block: str, inner: str) -> bool:
    """True for a name in a block of what the model declares to stay float32."""
    return stays_float32(model, f"{block}.{inner}")


def target_layers(model: nn.Module, targets: str | tuple[str, ...], unused: Collection[str] = frozenset()) -> list[str]:
    """The names of the linear layers that get adapters, in the model's order; none whose weight is named in `unused`.

    Raises UserError for targets that no layer has, with the nearest names, and for layers that no adapter is for.
    """
    if isinstance(targets, str):
        chosen = {
            f"{name}.{inner}".rstrip(".")
            for name, part in _parts(model, targets)
            for inner, layer in part.named_modules()
            if _is_target(layer)
        }
    else:
        chosen = _named(model, targets)
    names = [name for name, _ in model.named_modules() if name in chosen and f"{name}.weight" not in unused]
    names = [name for name in names if not stays_float32(model, name)]
    if not names:
        said = targets if isinstance(targets, str) else ", ".join(targets)
        raise UserError(
            f"{KEY}: training reaches no linear layer of {type(model).__name__} in {said}: use blocks, or names of layers"
        )
    return names


def _parts(model: nn.Module, targets: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that a word of `targets` stands for, by name. Raises UserError where a part holds experts."""
    blocks, plan = blocks_of(model), plan_of(model)
    if not blocks:
        raise UserError(f"model.adapter: {type(model).__name__} has no plan that names its blocks")
    parts = (
        blocks
        if targets == "blocks"
        else [each for name, block in blocks for each in _regions(name, block, REGIONS[targets])]
    )
    if targets == "attention+mlp" and plan is not None:
        parts += [each for pattern in plan.mlps for each in modules_like(model, pattern, "plan, mlps")]
    for name, part in parts:
        _check_stacked(name, part)
        yield name, part


def _regions(name: str, block: nn.Module, regions: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block's regions, by their names in the model."""
    for region in regions:
        own = parts_of(block).regions.get(region)
        for pattern in own.modules if own is not None else ():
            yield from (
                (f"{name}.{inner}", module)
                for inner, module in modules_like(block, pattern, f"plan, region {region!r}")
            )


def _named(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """The layers whose names end with one of the patterns. Raises UserError for one that no linear layer has."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    found: set[str] = set()
    for pattern in patterns:
        length = len(pattern.split("."))
        own = [name for name in layers if named_like(".".join(name.split(".")[-length:]), pattern)]
        if not own:
            ends = {".".join(name.split(".")[-length:]) for name in layers}
            raise UserError(
                f"{KEY}: {type(model).__name__} has no linear layer {pattern!r}{nearest(pattern, sorted(ends))}"
            )
        for name in own:
            if not _is_target(layers[name]):
                raise UserError(
                    f"{KEY}: {name} is a {type(layers[name]).__name__}, which computes more than its product; no adapter is for it"
                )
        found |= set(own)
    return found


def _is_target(layer: nn.Module) -> bool:
    """True for a plain linear layer."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and not isinstance(layer, PreparesInput)
    )


def _check_stacked(name: str, part: nn.Module) -> None:
    """Raises UserError where a part holds the stacked weights of experts."""
    for inner, module in part.named_modules():
        if any(parameter.ndim == 3 and len(parameter) > 1 for parameter in module.parameters(recurse=False)):
            raise UserError(
                f"{KEY}: {name}.{inner} holds the weights of experts, and no adapter is for these: use attention"
            )


def make_frozen_half(model: nn.Module) -> None:
    """Make frozen parameters bfloat16, in place and without values, except those that the model declares to stay float32.

    Layer norms stay float32 too, in which autocast computes them.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            floats = parameter.is_floating_point() and not stays_float32(model, full)
            if floats and not parameter.requires_grad:
                half = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                module.register_parameter(name, half)


class AdaptedWeights:
    """The files of a base under the names that its tensors have under adapters, as a `WeightSource`; adapters are not in them.

    Weights of one byte a number are rounded as they are read, one after another: no process holds others of the model.
    """

    def __init__(self, base: WeightSource, model: nn.Module) -> None:
        self.base = base
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FrozenLinear)}
        self._rounded = {
            f"{name}.weight": (f"{name}.scale", layer.in_features, layer.kind) for name, layer in layers.items()
        }

    @property
    def fingerprint(self) -> str:
        """That of the base."""
        return self.base.fingerprint

    def read(self, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted part of each tensor of the base. Raises UserError as the base."""
        scales = {scale for scale, _, _ in self._rounded.values()}
        wanted = {name: part for name, part in parts.items() if not is_adapter(name) and name not in scales}
        for name in self._rounded.keys() & wanted.keys():  # the scale of a row needs all of it
            wanted[name] = (wanted[name][0], slice(0, self._rounded[name][1]))
        own = {base_name(name): name for name in wanted}
        for stored, value in self.base.read({stored: wanted[name] for stored, name in own.items()}):
            name = own[stored]
            if name not in self._rounded:
                yield name, value
                continue
            scale, _, kind = self._rounded[name]
            bytes_RC, scale_R1 = quantised(value, kind)
            yield name, bytes_RC[:, parts[name][1]]
            yield scale, scale_R1


def base_name(name: str) -> str:
    """The name that a frozen tensor has without adapters."""
    return name.replace(f"{INSIDE}.", ".")


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's tensor."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_values(model: nn.Module, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the adapters' parameters with the whole float32 values on the CPU that they start from, by their names (law 1).

    As in peft: A is uniform within 1 / sqrt(inputs), B is zero, so that the model begins as its base.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            yield parameter, symmetric(parameter.shape, bound, seed, "init", name)
        elif ".lora_B." in name:
            yield parameter, torch.zeros(parameter.shape)


def adapted_layers(model: nn.Module) -> list[BaseTunerLayer]:
    """peft's layers in a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Compute without adapters inside the block.

    Only the flag of peft's layers is set: its `enable_adapters(False)` also ends the gradients of adapters, which no engine expects
    within a step.
    """
    layers = adapted_layers(model)
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer._disable_adapters = own
