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
    data_mesh = mesh.storage["dp_replicate", "shard"] if mesh.size("dp_replicate") > 1 else mesh.storage["shard"]
    for block in cast(DiffusionModel, model).blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    # The root is resharded too (not torch's default): after an evaluation its gathered parameters would otherwise
    # stay, and hide what an EMA swap or a loaded checkpoint writes into the shards.
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=True)
    return model


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
    if strategy == "fsdp":
        cast(FSDPModule, model).set_requires_gradient_sync(last)
    waiting = strategy == "ddp" and not last
    with cast(DistributedDataParallel, model).no_sync() if waiting else nullcontext():
        yield
