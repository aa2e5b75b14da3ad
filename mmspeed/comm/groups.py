"""Several axes of a mesh as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .axis import Axis, nodes_of


def flattened(name: str, axes: Sequence[Axis], mesh: DeviceMesh, nodes: Sequence[int] | None = None) -> Axis:
    """Several axes of a mesh that covers all processes as one axis, the first outermost in its order.

    It has the ledger and the exchange of the last; `nodes` as in `Axis.of`. It may make process groups, so every process of the run must
    call it.
    """
    several = [axis for axis in axes if axis.size > 1]
    if len(several) < 2:
        return replace(several[0] if several else axes[-1], name=name)
    assert mesh.mesh_dim_names is not None
    places = [mesh.mesh_dim_names.index(axis.name) for axis in several]
    others = [dim for dim in range(mesh.ndim) if dim not in places]
    size = math.prod(axis.size for axis in several)
    ranks = mesh.mesh.permute(*others, *places).reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    place = 0
    for axis in several:
        place = place * axis.size + axis.rank
    own_nodes = nodes_of(dist.get_process_group_ranks(group), nodes)
    last = several[-1]
    return Axis(name, group, size, place, last.ledger, last.exchange, own_nodes)
