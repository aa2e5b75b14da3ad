"""Parallel: how a model is spread over devices. The order of the steps matters and stands here on one screen."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmspeed.errors import UserError
from mmspeed.memory import recompute
from mmspeed.protocol import DiffusionModel

from .data_parallel import Strategy, autocast, no_sync, replicate, shard, unwrap

__all__ = ["Strategy", "autocast", "no_sync", "parallelize", "resolve_strategy", "unwrap"]


def resolve_strategy(strategy: str, world: int) -> Strategy:
    """`auto` is `none` on one device, else `fsdp`. Raises UserError for `none` on several: they would train apart."""
    if strategy == "auto":
        return "none" if world == 1 else "fsdp"
    if strategy not in ("none", "ddp", "fsdp"):
        raise UserError(f"parallel.strategy is {strategy!r}: use auto, none, ddp or fsdp")
    if strategy == "none" and world > 1:
        raise UserError(f"parallel.strategy: none is for one process, this run has {world}; use fsdp, ddp or auto")
    return cast(Strategy, strategy)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    strategy: Strategy,
    *,
    compute_dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    compile: bool = False,
) -> nn.Module:
    """`model`, already on its device in float32, made ready for training; changed in place, and wrapped by `ddp` only.

    Every rank must hand in the same parameters. `mesh` has the axes of `mmspeed.mesh` and may be None for `none`.
    State-dict names (through `torch.distributed.checkpoint.state_dict`) are those of the bare model in every strategy.
    """
    blocks = cast(DiffusionModel, model).blocks
    if checkpointing:  # innermost, so that what is compiled holds the recomputation
        for block in blocks:
            recompute(block)
    if compile:  # block by block: blocks of one kind share one graph, and sharding stays outside of it
        for block in blocks:
            block.compile()
    if compute_dtype != torch.float32:  # around the whole model: training, validation and sampling compute alike
        autocast(model, compute_dtype)
    if strategy == "none":
        return model
    if mesh is None:
        raise ValueError(f"strategy {strategy} needs a device mesh")
    return shard(model, mesh, compute_dtype) if strategy == "fsdp" else replicate(model)
