"""Flatten several axes of a mesh into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .axis import Axis, nodes_of


def flattened(name: str, *axes: Axis, mesh: DeviceMesh, nodes: Sequence[int] | None = None) -> Axis:
    """Flatten axes of a mesh that covers all processes into one axis; the first is the outermost, which varies slowest.

    The ledger and the exchange method are those of the last axis of several ranks; `nodes` as in `Axis.of`. This may make process groups,
    so every process of the run must call it.
    """
    split = [axis for axis in axes if axis.size > 1]
    if len(split) <= 1:
        return replace(split[0] if split else axes[-1], name=name)
    assert mesh.mesh_dim_names is not None
    places = [mesh.mesh_dim_names.index(axis.name) for axis in split]
    others = [dim for dim in range(mesh.ndim) if dim not in places]
    size, rank = math.prod(axis.size for axis in split), 0
    for axis in split:
        rank = rank * axis.size + axis.rank
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.permute(*others, *places).reshape(-1, size).tolist())
    own_nodes = nodes_of(dist.get_process_group_ranks(group), nodes)
    return Axis(name, group, size, rank, split[-1].ledger, split[-1].exchange, own_nodes)
