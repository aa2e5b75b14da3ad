"""Measure the memory of a piece of work by torch's own count of its allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from mmspeed.device import Device
from mmspeed.torch_internals import cpu_totals, is_sharded


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
    releases, one by one as its allocator counts them: exact and repeatable, unlike the size of a process. What other threads allocate
    counts only with `counted_alike`; what they release always does.
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
    with no_collector():
        events = cpu_totals(work)
    if not events:
        return 0, 0
    before = events[0][1] - events[0][0]
    return events[-1][1] - before, max(0, *(total - before for _, total in events))
