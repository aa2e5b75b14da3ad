"""The device mesh: the processes of a run in the views of `mmspeed.axes`, made once and passed on as an argument.

`layout_of` tells for each parameter which axes hold parts of it, and which hold replicas. Norms, clipping, groups of an optimizer and
gradient release read it, and name no axis.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axes import DENSE, EXPERT, NODES, STAGES, STORAGE, AxisName, AxisSizes, MeshTable, Reader, mesh_table
from .device import Device
from .rendezvous import attempt_store
from .torch_internals import is_sharded


@contextmanager
def process_group(device: Device, timeout_seconds: float = 1800.0) -> Iterator[None]:
    """Keep this process in the launcher's process group, or in a group of one when no launcher started it.

    A launcher's group is made once and lasts as long as the process: to end it after an error on one rank would wait for peers
    that never come (nccl), and a second group under the same keys of the launcher's store meets the first one's addresses.
    Each attempt of a launcher that restarts its processes has keys of its own (`rendezvous`). A group of one ends here.
    """
    if dist.is_initialized():
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        device.let_exchanges_last(timeout_seconds)
        shared = attempt_store(timeout_seconds)
        if shared is None:
            dist.init_process_group(device.backend, timeout=timeout)
        else:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(device.backend, store=shared, rank=rank, world_size=world, timeout=timeout)
        yield
        return
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def patient_group() -> dist.ProcessGroup | None:
    """A CPU group of all ranks whose members may be 30 days apart, for work that is shared out once; None for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


@dataclass(frozen=True)
class Mesh:
    """The devices of a run by what they compute (`dense`), and by what they hold (`storage`; `expert`, where experts are split).

    Rank by rank the views are the same devices. `rank` is this process's. `nodes`: `expert`, with `ep` by nodes.
    """

    table: MeshTable
    rank: int
    dense: DeviceMesh
    storage: DeviceMesh
    expert: DeviceMesh | None = None  # None: experts lie on `storage`, as all parameters do
    nodes: DeviceMesh | None = None

    def size(self, axis: AxisName | str) -> int:
        """Devices along an axis of any view."""
        return self.table.sizes[AxisName(axis)]

    @property
    def staged(self) -> bool:
        """True where the stages of a pipeline hold parts of a model."""
        return self.size(AxisName.PP) > 1

    def reader(self, split: bool = True) -> Reader:
        """The share that this process reads of items whose tokens are split over a group of ranks, or of items that are not split."""
        return self.table.reader(self.rank, split)

    @property
    def in_stage(self) -> Reader:
        """The number of this process among those of its pipeline stage, over which the items of a step are dealt."""
        return self.table.in_stage(self.rank)

    @property
    def stage(self) -> int:
        """The place of this process among the stages of a pipeline."""
        return self.table.place(self.rank)[AxisName.PP]

    @property
    def knows_loss(self) -> bool:
        """True on the last pipeline stage."""
        return self.table.knows_loss(self.rank)

    @property
    def first_of_group(self) -> bool:
        """True for the one process, of those that compute an item together, that reports for all."""
        return self.table.first_of_group(self.rank)

    def submesh(self, *axes: AxisName) -> DeviceMesh:
        """The submesh of these axes, of a view that holds parameters. Raises ValueError where no view has them all."""
        views = ((STORAGE, self.storage), (EXPERT, self.expert))
        view = next(
            (candidate for names, candidate in views if candidate is not None and set(axes) <= set(names)), None
        )
        if view is None:
            raise ValueError(f"no view of this mesh holds parameters along {', '.join(axes)}")
        return view[tuple(axis.value for axis in axes)]

    def copies(self, layout: ParameterLayout) -> int:
        """The number of processes that hold the same part of a parameter."""
        return math.prod(self.table.shape(layout.replicas))

    @cached_property
    def of_stage(self) -> dist.ProcessGroup | None:
        """A CPU group of the processes of this one's stage; None where all are. Its first use is a collective call of all processes."""
        if not self.staged:
            return None
        each = self.table.world // self.size(AxisName.PP)
        groups = [
            dist.new_group(range(stage * each, (stage + 1) * each), backend="gloo")
            for stage in range(self.size(AxisName.PP))
        ]
        return groups[self.stage]

    def across_stages(self) -> list[dist.ProcessGroup]:
        """Groups over which sums of one stage's parameters become those of all; none without pipeline stages."""
        return [self.dense.get_group(axis.value) for axis in STAGES if self.size(axis) > 1]


def make_mesh(device: Device, sizes: AxisSizes | None = None) -> Mesh:
    """The mesh of this world; a collective call. None: all processes shard. Raises UserError where `mesh_table` does."""
    table = mesh_table(dist.get_world_size(), sizes)

    def view(axes: tuple[AxisName, ...]) -> DeviceMesh:
        names = tuple(axis.value for axis in axes)
        return init_device_mesh(device.kind, table.shape(axes), mesh_dim_names=names)

    asked = sizes or AxisSizes()
    expert = view(EXPERT) if asked.ep * asked.etp > 1 else None
    return Mesh(table, dist.get_rank(), view(DENSE), view(STORAGE), expert, view(NODES) if asked.ep_inner else None)


@dataclass(frozen=True)
class ParameterLayout:
    """The axes that hold different parts of a parameter, and those that hold replicas of them, which computed different items or tokens."""

    parts: tuple[AxisName, ...]
    replicas: tuple[AxisName, ...]


def layout_of(parameter: Tensor) -> ParameterLayout:
    """The layout of a parameter, which lies on the view that its mesh is of: axes of that view that do not split it replicate it.

    A parameter that is no DTensor lies on the storage view, whole. Axes of one device hold no parts.
    """
    spread = _spread(parameter)
    view = EXPERT if any(axis not in STORAGE for axis in spread) else STORAGE
    parts = tuple(axis for axis in view if spread.get(axis, False))
    return ParameterLayout(parts, tuple(axis for axis in view if axis not in (*parts, *STAGES)))


def _spread(parameter: Tensor) -> dict[AxisName, bool]:
    """The axes of a parameter's own mesh: True where they split it."""
    if not is_sharded(parameter):
        return {}
    mesh = parameter.device_mesh
    names = [AxisName(name) for name in mesh.mesh_dim_names or ()]
    return {
        name: not at.is_replicate() and mesh.size(dim) > 1
        for dim, (name, at) in enumerate(zip(names, parameter.placements, strict=True))
    }


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in lists of one mesh each, of fewest axes first, since torch computes with tensors of one mesh at a time."""
    lists: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    return [lists[mesh] for mesh in sorted(lists, key=lambda mesh: 0 if mesh is None else mesh.ndim)]
