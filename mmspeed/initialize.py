"""Values that parameters start from, and how parameters take them, whole or sharded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mmspeed.protocols import InitializesWeights
from mmspeed.rng import symmetric


def initial_value(name: str, shape: torch.Size, seed: int, zero: bool) -> Tensor:
    """The float32 value on the CPU that a parameter starts from; a pure function of its name, shape and the seed.

    Matrices are Xavier-uniform (Glorot & Bengio 2010), or zero where `zero`; norm scales are one, biases zero.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") and not zero else torch.zeros(shape)
    if zero:
        return torch.zeros(shape)
    bound = math.sqrt(6.0 / (shape[0] + shape[1]))
    return symmetric(shape, bound, seed, "init", name)


def own_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """The part of a whole value that this process holds of a parameter, on its device; without communication."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


@torch.no_grad()
def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a whole value into a parameter; a sharded parameter takes its own part, without communication."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.copy_(own_part(parameter, value))


def init_weights(
    model: InitializesWeights, seed: int, put: Callable[[nn.Parameter, Tensor], None] = set_parameter
) -> None:
    """Fill every parameter of a model with the values of a seed (law 1).

    Parameters may have any dtype, come from `to_empty`, and be sharded by `fully_shard`. `put(parameter, value)` takes each whole value,
    float32 on the CPU; where weights lie apart from the parameters, it brings them there.
    """
    for parameter, value in model.initial_weights(seed):
        put(parameter, value)
