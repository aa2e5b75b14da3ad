"""Values that parameters start from, and how parameters take them, whole or sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from mmspeed.protocols import InitializesWeights, Part, WeightSource
from mmspeed.rng import symmetric
from mmspeed.torch_internals import is_sharded


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
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def own_span(tensor: Tensor) -> Part:
    """The part of a tensor that this process holds, as a span of each dimension; of an unsharded one all."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    (part,) = tensor.__create_chunk_list__()  # the interface of torch's checkpoint engine
    return tuple(slice(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True))


@torch.no_grad()
def set_part(parameter: Tensor, part: Tensor) -> None:
    """Copy the part of a value that this process holds into a parameter or buffer, which may have another number type."""
    (parameter.to_local() if is_sharded(parameter) else parameter).copy_(part)


def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a whole value into a parameter; a sharded parameter takes its own part, without communication."""
    set_part(parameter, own_part(parameter, value))


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, on_host: Collection[Tensor] = ()) -> None:
    """Give the tensors of a model that are on the meta device memory on `device`, without values; move the others there.

    `on_host`: parameters whose memory is the host's instead.
    """
    kept = {id(tensor) for tensor in on_host}

    def placed(tensor: Tensor) -> Tensor:
        place = torch.device("cpu") if id(tensor) in kept else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    model._apply(placed)


def init_weights(
    model: InitializesWeights, seed: int, put: Callable[[nn.Parameter, Tensor], None] = set_parameter
) -> None:
    """Fill every parameter of a model with the values of a seed (law 1).

    Parameters may have any dtype, come from `to_empty`, and be sharded by `fully_shard`. `put(parameter, value)` takes each whole value,
    float32 on the CPU; where weights lie apart from the parameters, it brings them there.
    """
    for parameter, value in model.initial_weights(seed):
        put(parameter, value)


def read_weights(
    model: nn.Module,
    source: WeightSource,
    put: Callable[[nn.Parameter, Tensor], None] = set_part,
    frozen_alone: bool = False,
) -> None:
    """Fill every parameter and saved buffer of a model from files; each process reads the bytes of its own parts alone.

    `model` is the bare one, sharded or not, after `materialize`. `put(parameter, part)` takes the part of each value that this process
    holds, in the number type of the files, on the CPU. `frozen_alone`: parameters that train and buffers are left as they are, for a
    checkpoint to fill, and where nothing is frozen no file is opened.
    """
    if frozen_alone:
        frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        for name, part in source.read({name: own_span(tensor) for name, tensor in frozen.items()}) if frozen else ():
            put(frozen[name], part)
        return
    parameters = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict().keys()}
    for name, part in source.read({name: own_span(tensor) for name, tensor in {**parameters, **buffers}.items()}):
        if name in parameters:
            put(parameters[name], part)
        else:
            set_part(buffers[name], part)


@torch.no_grad()
def stand_in_weights(model: nn.Module, put: Callable[[nn.Parameter, Tensor], None] = set_part) -> None:
    """Fill every parameter with small arbitrary numbers, for measurements in which their values do not matter."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        local = parameter.to_local() if is_sharded(parameter) else parameter
        value = torch.ones(local.shape) if local.ndim < 2 else 0.02 * torch.randn(local.shape, generator=generator)
        put(parameter, value)
