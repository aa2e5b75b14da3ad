"""Data parallelism: sharded (FSDP2, after ZeRO: Rajbhandari et al., 2020), hybrid-sharded, and replicated (DDP).

Both engines average gradients over all ranks; `mmspeed.loop.step` scales losses so that this becomes the mean over
samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmspeed.axes import AxisName
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.protocol import DiffusionModel

Strategy = Literal["none", "ddp", "fsdp"]


class _Autocast(nn.Module):
    """Mixed in before a model's own class: its forward runs under torch.autocast."""

    _autocast_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type = next(self.parameters()).device.type
        with torch.autocast(device_type, self._autocast_dtype):
            return super().forward(*args, **kwargs)


def autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute its matrix products in `dtype`, in place; parameters and names stay as they are."""
    mix_in(model, _Autocast)
    cast(_Autocast, model)._autocast_dtype = dtype


def shard(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> nn.Module:
    """`fully_shard` on each block, then on the root; replicas of the sharded model where `dp_replicate` > 1.

    Parameters travel in `compute_dtype`, gradients are summed in float32. Inputs are not cast: the root would round
    timesteps to `compute_dtype` too; autocast casts what the matrix products need.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    axes = (AxisName.DP_REPLICATE, AxisName.SHARD) if mesh.size(AxisName.DP_REPLICATE) > 1 else (AxisName.SHARD,)
    data_mesh = mesh.submesh(*axes)
    for block in cast(DiffusionModel, model).blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    # The root is resharded too (not torch's default): after an evaluation its gathered parameters would otherwise
    # stay, and hide what an EMA swap or a loaded checkpoint writes into the shards.
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=True)
    if is_half(model):
        _keep_sums_in_float32(model)
    return model


def make_half(model: nn.Module) -> None:
    """Make the parameters that train bfloat16, in place; others, of which no optimizer has float32 weights, and buffers stay.

    On the meta device or before there is anything in them.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.detach().to(torch.bfloat16)))


def is_half(model: nn.Module) -> bool:
    """Whether a model's parameters are bfloat16."""
    return any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def take_float32_gradients(model: nn.Module) -> None:
    """Let bfloat16 parameters have float32 gradients, so that micro-batches are not summed in 8 bits. Before the first backward."""
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


def _keep_sums_in_float32(model: nn.Module) -> None:
    """The sharding engine would round the sums of gradients over ranks to the parameters' dtype, which it looks up at the first forward."""
    states = [cast(Any, module)._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]

    def before(*_: Any) -> None:
        for state in states:
            # torch 2.13 can have several groups of parameters a module, 2.11 has one
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in filter(None, groups):
                if not hasattr(group, "_orig_dtype"):
                    raise RuntimeError(
                        f"torch {torch.__version__} rounds sums of gradients elsewhere: mmspeed does not know it"
                    )
                group._orig_dtype = torch.float32

    model.register_forward_pre_hook(before)  # comes after the engine's own


def replicate(model: nn.Module) -> nn.Module:
    """DistributedDataParallel over all ranks. Every parameter must take part in every step."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name is unknown to 2.11, and buffers change alike on all ranks
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model inside DistributedDataParallel; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def no_sync(model: nn.Module, strategy: Strategy, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: gradients are exchanged only with the `last` one of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    waiting = isinstance(model, DistributedDataParallel) and not last
    with cast(DistributedDataParallel, model).no_sync() if waiting else nullcontext():
        yield
