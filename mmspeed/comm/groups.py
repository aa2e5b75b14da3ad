"""Two axes of a mesh as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .axis import Axis, nodes_of


def flattened(name: str, outer: Axis, inner: Axis, mesh: DeviceMesh, nodes: Sequence[int] | None = None) -> Axis:
    """`outer` x `inner` of a mesh that covers all processes as one axis, with `outer` outermost in its order.

    It has the ledger and the exchange of `inner`; `nodes` as in `Axis.of`. It may make process groups, so every process of the run must
    call it.
    """
    if outer.size == 1 or inner.size == 1:
        return replace(inner if outer.size == 1 else outer, name=name)
    assert mesh.mesh_dim_names is not None
    places = [mesh.mesh_dim_names.index(axis.name) for axis in (outer, inner)]
    others = [dim for dim in range(mesh.ndim) if dim not in places]
    ranks = mesh.mesh.permute(*others, *places).reshape(-1, outer.size * inner.size)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    place = outer.rank * inner.size + inner.rank
    own_nodes = nodes_of(dist.get_process_group_ranks(group), nodes)
    return Axis(name, group, outer.size * inner.size, place, inner.ledger, inner.exchange, own_nodes)
