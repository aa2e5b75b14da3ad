"""Memory of a call of attention: its peak, and what each further thread of a CPU holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mmspeed.compute.sparse import ClusterPlan
from mmspeed.device import Device
from mmspeed.memory.planning.peak import peak_bytes


def peak_extra_bytes(device: Device, work: Callable[[], Any]) -> int:
    """The most memory in use at one time during `work` beyond what was in use before."""
    device.synchronize()
    before = 0 if device.kind == "cpu" else device.memory_bytes()
    return peak_bytes(device, 0, work) - before


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside, since its count of CPU allocations sees only one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def gathered_bytes(plan: ClusterPlan, tail: bool, width: int, element_size: int) -> int:
    """The most bytes that each further CPU thread holds: gathered keys and values of a cluster, and their gradients."""
    rows = int(plan.lengths().max()) + (plan.tail.clusters if tail and plan.tail is not None else 0)
    return 4 * rows * width * element_size
