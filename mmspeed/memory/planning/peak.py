"""Measure the memory of a piece of work by torch's own count of its allocations."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from mmspeed.device import Device
from mmspeed.torch_internals import is_sharded

MEMORY_EVENT = "[memory]"


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, for DTensors those of this process; shared memory counts once."""
    storages = {}
    for tensor in tensors:
        storage = (tensor.to_local() if is_sharded(tensor) else tensor).detach().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes(tensors: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes of tensors and of an optimizer's state, as this process holds them; shared memory counts once."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return local_bytes([*tensors, *states])


def peak_bytes(device: Device, resident: int, work: Callable[[], object]) -> int:
    """The most bytes in use at one time during `work`. `resident` are those in use before, for the CPU's count.

    For an accelerator it is the caching allocator's peak. For the CPU it is `resident` and the sum over torch's allocations and
    releases, one by one as its profiler records them: exact and repeatable, unlike the size of a process.
    """
    if device.kind == "cpu":
        return resident + added_on_cpu(work)[1]
    device.synchronize()
    device.reset_peak_memory()
    work()
    device.synchronize()
    return device.peak_memory_bytes()


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep the garbage collector from starting by itself.

    So no count depends on the moment of a collection: memory that earlier work left in reference cycles does not count as freed by this
    one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def added_on_cpu(work: Callable[[], object]) -> tuple[int, int]:
    """(bytes of the CPU that `work` adds and leaves allocated, bytes that it adds at its peak), as `peak_bytes` counts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else some versions log each start and stop
    with no_collector(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as recorded:
        work()
    assert recorded.kineto_results is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == MEMORY_EVENT]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return held, peak
