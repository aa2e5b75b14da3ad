"""Split linear layers under low-rank adapters (LoRA: Hu et al. 2021) as peft makes them.

Such a layer computes base_layer(x) + scaling * lora_B(lora_A(x)). It exchanges tokens once, around both terms:

    role                  base_layer        lora_A       lora_B
    column, vocabulary    along outputs     whole        along outputs
    row                   along inputs      along inputs whole

So both terms of a column layer take the same gathered input, and one reduce-scatter serves both terms of a row layer: the B(A_p x_p) of all
processes p add up to the whole, as the base layer's products do. Weights that stay whole get the gradients of a process's own part only;
these are summed after backward (`mmspeed.parallel.tensor.sum_shared_gradients`), as for all parameters without a role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from mmspeed.errors import UserError
from mmspeed.memory.chunks import is_plain_linear
from mmspeed.protocols.plan import check_adapter

INSTEAD = "merge it into the weights first, or use parallel.ulysses or ring"


@runtime_checkable
class LowRankLayer(Protocol):
    """A linear layer under LoRA adapters, by their names: peft's `lora.Linear`."""

    base_layer: nn.Module
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    lora_dropout: nn.ModuleDict
    lora_variant: Mapping[str, object]
    merged_adapters: Sequence[str]


@runtime_checkable
class ParameterAdapter(Protocol):
    """A layer whose adapters add a product of two matrices to a parameter, instead of to an output: peft's `ParamWrapper`."""

    parameter_name: str


def low_rank_parts(layer: nn.Module, role: str, where: str) -> tuple[nn.Linear, list[nn.Linear], list[nn.Linear]]:
    """(base layer, the A of each adapter, the B of each adapter) of a layer under LoRA adapters.

    Raises UserError for adapters whose parts would not add up to the whole.
    """
    if not isinstance(layer, LowRankLayer) or isinstance(layer, ParameterAdapter):
        raise _refused(where, role, "its adapter is no LoRA of a linear layer", INSTEAD)
    others = {name.partition(".")[0] for name, _ in layer.named_parameters()} - {"base_layer", "lora_A", "lora_B"}
    if layer.lora_variant or others:
        kind = ", ".join(sorted({type(each).__name__ for each in layer.lora_variant.values()} | others))
        raise _refused(where, role, f"its adapter computes with more than two products ({kind})", INSTEAD)
    if layer.merged_adapters:
        names = ", ".join(layer.merged_adapters)
        raise _refused(where, role, f"its weight holds merged adapters ({names})", "unmerge or unload them first")
    if any(isinstance(drop, nn.Dropout) and drop.p > 0 for drop in layer.lora_dropout.modules()):
        raise _refused(
            where,
            role,
            "each process would draw another dropout of its adapter",
            "set lora_dropout to 0, or use parallel.ulysses or ring",
        )
    check_adapter(layer, where)
    first, second = list(_products(layer.lora_A, role, where)), list(_products(layer.lora_B, role, where))
    return _product(layer.base_layer, "base_layer", role, where), first, second


def _products(layers: nn.ModuleDict, role: str, where: str) -> Iterator[nn.Linear]:
    for name, layer in layers.items():
        yield _product(layer, name, role, where)


def _product(layer: nn.Module, name: str, role: str, where: str) -> nn.Linear:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise _refused(
            where, role, f"{name} is a {type(layer).__name__}, which computes more than its product", INSTEAD
        )
    if not is_plain_linear(layer):
        raise refused_weight(layer, role, where)
    return layer


def refused_weight(layer: nn.Module, role: str, where: str) -> UserError:
    """The error for a layer whose weight is quantised."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    kind = "no parameter" if weight is None else f"a {type(weight).__name__} of {weight.dtype}"
    reason = f"its weight is quantised ({kind}), and checkpoints and sharding cannot name a part of it"
    return _refused(where, role, reason, "load it unquantised, or use parallel.ulysses or ring")


def _refused(where: str, role: str, reason: str, cure: str) -> UserError:
    return UserError(f"parallel.tp: {where} has the role {role}, and {reason}: {cure}")
