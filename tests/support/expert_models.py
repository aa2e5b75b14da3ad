"""Parameters of a block with experts, on the views of a mesh that engines lay them on."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from mmspeed import rng
from mmspeed.axes import AxisName
from mmspeed.mesh import Mesh

SHAPES = {"norm": (12,), "column": (8, 6), "experts": (4, 6, 8)}


def gradient(name: str, stage: int) -> Tensor:
    return rng.normal(SHAPES[name], 0, name, stage)


def spread(mesh: Mesh, value: Tensor, at: dict[AxisName, Placement]) -> Tensor:
    """This process's part of a whole tensor, by the placements on axes of the view that has them all."""
    return distribute_tensor(value, mesh.submesh(*at), list(at.values()), src_data_rank=None)


def placements(mesh: Mesh, sharded_experts: bool) -> dict[str, dict[AxisName, Placement]]:
    """Where the parameters lie: as FSDP, tensor and expert parallelism lay them."""
    replicas: dict[AxisName, Placement] = {}
    if mesh.size(AxisName.DP_REPLICATE) > 1:
        replicas = {AxisName.DP_REPLICATE: Replicate()}
    dense = {**replicas, AxisName.SHARD: Shard(0)}
    column = {**dense, AxisName.TP: Shard(1)} if mesh.size(AxisName.TP) > 1 else dense
    experts = dense
    if mesh.expert is not None:
        experts = {**replicas, AxisName.EDP: Shard(1) if sharded_experts else Replicate()}
        experts |= {AxisName.EP: Shard(0)}
        experts |= {AxisName.ETP: Shard(2)} if mesh.size(AxisName.ETP) > 1 else {}
    return {"norm": dense, "column": column, "experts": experts}
