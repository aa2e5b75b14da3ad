"""The values that a decoder starts from, each a pure function of its parameter's name, its shape and the seed (law 1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.experts import Router
from mmspeed.rng import normal

BEHIND = ("post_attention_layernorm", "post_mlp_layernorm")  # sandwich norms behind attention and MLP


def initial_values(model: nn.Module, settings: DecoderSettings, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield every parameter with its whole value, float32 on the CPU; then routers forget loads and biases.

    Matrices are normal with the standard deviation of the settings, norms 1, biases 0. Norms behind attention and MLP of a sandwich start
    at 1 / sqrt(depth), so that the sum over blocks has the size of one (the depth-scaled sandwich norm of Pangu Ultra, 2025).
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield parameter, settings.first_std * normal(tuple(parameter.shape), seed, "init", name)
        elif name.endswith("bias"):
            yield parameter, torch.zeros(parameter.shape)
        else:
            scaled = settings.sandwich and name.split(".")[-2] in BEHIND
            yield parameter, torch.full(parameter.shape, settings.num_hidden_layers**-0.5 if scaled else 1.0)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()
