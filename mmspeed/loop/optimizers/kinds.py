"""The kinds of parameters, by the modules that hold them: what a parameter is decides its update, not how many dims it has."""

from __future__ import annotations

from typing import Literal

from torch import nn

# "matrix": of a linear layer; "stack": the matrices of experts (G, O, I); "kernel": of a convolution; "embedding"; "other": a bias, the
# scale of a norm, a table that is added or multiplied, such as Wan's scale_shift_table.
Kind = Literal["matrix", "stack", "kernel", "embedding", "other"]
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kinds_of(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """The kind of each parameter of a bare model; a shared one is what it is where it is met first."""
    kinds: dict[nn.Parameter, Kind] = {}
    for path, module in model.named_modules():
        experts = path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
        for name, parameter in module.named_parameters(recurse=False):
            kinds.setdefault(parameter, _kind(module, name, parameter.ndim, experts))
    return kinds


def _kind(module: nn.Module, name: str, dims: int, experts: bool) -> Kind:
    """The kind of a parameter of so many dims; torch and the libraries of models call that of a product `weight`."""
    if dims < 2 or "bias" in name or isinstance(module, NORMS):
        return "other"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if experts and dims == 3:
        return "stack"
    if "weight" in name.split("_"):  # also in_proj_weight, weight_ih_l0
        return "matrix" if dims == 2 else "kernel"
    return "other"


def decays(kind: Kind) -> bool:
    """True for parameters that weight decay is for."""
    return kind != "other"
