"""The device mesh: named axes, made once, handed on as an argument.

Axes, outermost first: `dp_replicate` (every rank holds all parameters) and `dp_shard` (parameters, gradients and optimizer state
are split), which both split the batch; `ring` and `ulysses`, which split the tokens of a video; `tp`, which splits weight matrices.
Devices that talk most stand nearest to each other.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .device import Device
from .errors import UserError

AXES = ("dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@contextmanager
def process_group(device: Device, timeout_seconds: float = 1800.0) -> Iterator[None]:
    """Inside, this process is in the launcher's process group, or in a group of one when no launcher started it.

    A launcher's group is made once and lasts as long as the process: to end it after an error on one rank would wait for peers
    that never come (nccl), and a second group under the same keys of the launcher's store meets the first one's addresses.
    A group of one ends here.
    """
    if dist.is_initialized():
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(device.backend, timeout=timeout)
        yield
        return
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def patient_group(days: float = 30.0) -> dist.ProcessGroup | None:
    """A CPU group of all ranks whose members may be days apart, for work that is shared out once; None for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=days))


@dataclass(frozen=True)
class Mesh:
    """The devices of a run, named twice: by what they compute, and by what they hold.

    `axes` has the axes of `AXES`. `storage` has `dp_replicate`, `shard` and `tp`: parameters are split over `shard`, which is
    dp_shard x ring x ulysses. Rank by rank the two are the same.
    """

    axes: DeviceMesh
    storage: DeviceMesh

    def size(self, axis: str) -> int:
        """Devices along an axis of `axes`."""
        return self.axes[axis].size()


def make_mesh(
    device: Device, dp_replicate: int = 1, dp_shard: int = -1, ring: int = 1, ulysses: int = 1, tp: int = 1
) -> Mesh:
    """The mesh of this world. One of dp_replicate and dp_shard may be -1: it takes what the others leave.

    Raises UserError when the product of the axes is not the world size.
    """
    world = dist.get_world_size()
    sizes = dict(zip(AXES, (dp_replicate, dp_shard, ring, ulysses, tp), strict=True))
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError("parallel: only one of dp_replicate and dp_shard may be -1")
    known = math.prod(sizes.values()) * (-1 if free else 1)
    if free and known > 0 and world % known == 0:
        sizes[free[0]] = world // known
    elif free or known != world:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
        raise UserError(f"parallel: {shown} does not make the {world} processes of this run; change one, or --nproc")
    axes = init_device_mesh(device.kind, tuple(sizes.values()), mesh_dim_names=AXES)
    held = (sizes["dp_replicate"], sizes["dp_shard"] * ring * ulysses, tp)
    return Mesh(axes, init_device_mesh(device.kind, held, mesh_dim_names=("dp_replicate", "shard", "tp")))
