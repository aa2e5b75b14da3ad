"""Tensor parallelism: weight matrices split over the `tp` axis by the roles that a model declares.

After Megatron-LM (Shoeybi et al. 2019) with the norms on shards of the tokens (Korthikanti et al. 2022): between a column
layer and its row layer a process has some heads or hidden units of all tokens; elsewhere all channels of some tokens. How tokens
come and go there is `tokens.TokenShard.all_gather` and `reduce_scatter`; here are the weights, which are DTensors, so that sharding,
checkpoints and the optimizer know how they are split.

Parameters without a role are on every process of the axis, and meet other tokens on each: their gradients are summed over it
after the backward pass (`sum_shared_gradients`).

Legend: I O channels in and out.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmspeed.comm import Axis
from mmspeed.comm.axis import nbytes
from mmspeed.errors import UserError
from mmspeed.mesh import layout_of
from mmspeed.mixin import mix_in
from mmspeed.protocols import Role


class _TensorSplitLinear(nn.Linear):
    """Mixed in before a linear layer's own class: computes with this process's part of the weight."""

    _bias_share: float

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *applied(self))


def applied(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias that this process computes a linear layer with, split or not."""
    bias = local(layer.bias) if layer.bias is not None else None
    share = layer._bias_share if isinstance(layer, _TensorSplitLinear) else 1.0
    if bias is not None and share != 1.0:
        bias = bias * share  # every process adds a part: their outputs are summed
    return local(layer.weight), bias


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor itself. Gradients go back as they come."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_heads(heads: int, ulysses: int, tp: int) -> None:
    """Raises UserError where a model's heads cannot be split over `tp`, and each part exchanged over `ulysses`, processes."""
    if heads % tp:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"parallel.tp {tp} does not divide the model's {heads} heads: use one of {fits}")
    if heads // tp < ulysses:
        each = "" if tp == 1 else f" (of {heads}, with parallel.tp {tp})"
        raise UserError(
            f"parallel.ulysses {ulysses} is more than the {heads // tp} heads of a device{each}: use ring for the rest"
        )


def split_layers(model: nn.Module, mesh: DeviceMesh, heads: int, roles: Mapping[str, Role]) -> None:
    """Split the linear layers that `roles` names (by patterns of module names) over a mesh of one axis, in place.

    Raises UserError when the heads or a layer's channels do not divide, ValueError for a pattern that names nothing.
    """
    check_heads(heads, 1, mesh.size())
    for pattern, role in roles.items():
        names = [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"the role of {pattern} names no module of {type(model).__name__}")
        for name in names:
            layer = model.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"{name} has the role {role} and is no linear layer")
            _split_layer(layer, mesh, role, name)


def _split_layer(layer: nn.Linear, mesh: DeviceMesh, role: Role, name: str) -> None:
    """Split one layer: the weight along O for a column layer, along I for a row layer, whose bias stays whole."""
    parts, place = mesh.size(), mesh.get_local_rank()
    dim = 0 if role == "column" else 1
    if layer.weight.shape[dim] % parts:
        raise UserError(f"parallel.tp {parts} does not divide the {layer.weight.shape[dim]} channels of {name}")

    def part(whole: Tensor, along: int) -> nn.Parameter:
        own = whole.detach().chunk(parts, along)[place].clone()
        split = DTensor.from_local(own, mesh, [Shard(along)], run_check=False)
        return nn.Parameter(split, requires_grad=whole.requires_grad)

    layer.weight = part(layer.weight, dim)
    if layer.bias is not None and role == "column":
        layer.bias = part(layer.bias, 0)
    mix_in(layer, _TensorSplitLinear)._bias_share = 1.0 if role == "column" else 1.0 / parts


@torch.no_grad()
def sum_shared_gradients(parameters: Iterable[nn.Parameter], tensor: Axis) -> None:
    """Sum over the tensor-parallel axis the gradients of the parameters that all its processes hold, in one exchange a dtype.

    Sharded parameters are summed shard by shard, after the sharding engine has done its part.
    """
    if tensor.size == 1:
        return
    grads = [local(p.grad) for p in parameters if p.grad is not None and tensor.name in layout_of(p).replicas]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        some = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in some])
        dist.all_reduce(flat, group=tensor.group)
        tensor.count("all_reduce", 2 * nbytes(flat) * (tensor.size - 1) // tensor.size)  # as a ring makes it
        for grad, summed in zip(some, flat.split([grad.numel() for grad in some]), strict=True):
            grad.copy_(summed.view_as(grad))
