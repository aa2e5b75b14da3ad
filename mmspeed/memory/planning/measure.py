"""Measure a piece of work, on a device or from shapes alone: the bytes that it leaves and has at its peak, and its time.

From shapes, tensors are torch's fake ones: every operation returns a result without data, and nothing is computed. Bytes are then those of
all tensors that are alive, which is exact except for an operation's own workspace while it runs. Time is that of the roofline model
(Williams et al., 2009): an operation takes as long as its arithmetic or its memory traffic, whichever is longer.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspeed.device import Device
from mmspeed.torch_internals import (
    CPU_FLASH,
    GROUPED_MM,
    TorchDispatchMode,
    changes_arguments,
    free_weak_pointer,
    packet_of,
    storage_address,
    storage_at,
    tree_leaves,
    weak_pointer,
)

from .peak import added_on_cpu

Work = Callable[[], object]
_DEVICE = torch.ops.prim.device.default


class Profiler(Protocol):
    """A profiler of memory and time."""

    @property
    def spent(self) -> float | None:
        """Seconds of all sections so far, where sections are timed; else None."""
        ...

    def section(self, work: Work) -> tuple[int, int]:
        """(bytes that `work` adds and leaves, bytes that it adds at its peak)."""
        ...

    def seconds(self, works: Sequence[tuple[Work, Work]], rounds: int) -> list[float]:
        """The time of each work, as a median over rounds. Each is paired with its preparation, which is not timed."""
        ...


class DeviceProfiler:
    """A profiler of a device, by the allocator's count and by a clock."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def spent(self) -> None:
        return None

    def section(self, work: Work) -> tuple[int, int]:
        if self.device.kind == "cpu":
            return added_on_cpu(work)
        self.device.synchronize()
        before = self.device.memory_bytes()
        self.device.reset_peak_memory()
        work()
        self.device.synchronize()
        return self.device.memory_bytes() - before, self.device.peak_memory_bytes() - before

    def seconds(self, works: Sequence[tuple[Work, Work]], rounds: int) -> list[float]:
        """Medians over rounds; each round goes through all works, so that disturbances of the machine affect all alike."""
        taken: list[list[float]] = [[] for _ in works]
        for turn in range(rounds + 1):
            for place, (prepare, work) in enumerate(works):
                prepare()
                self.device.synchronize()
                began = time.perf_counter()
                work()
                self.device.synchronize()
                if turn:  # the first chooses kernels and fills the allocator's cache
                    taken[place].append(time.perf_counter() - began)
        return [statistics.median(each) for each in taken]


class FakeTensorProfiler:
    """A profiler of fake tensors. Use it inside of a `FakeTensorMode`.

    flops: operations per second of a device, a multiply-add as two. bandwidth: bytes per second of its memory.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        self._count, self._roofline = StorageTracker(), Roofline(flops, bandwidth)

    @property
    def spent(self) -> float:
        return self._roofline.seconds

    @property
    def head_widths(self) -> dict[int, int]:
        """Operations of fused attention in all sections, by the width of its heads."""
        return dict(self._roofline.head_widths)

    def section(self, work: Work) -> tuple[int, int]:
        count = self._count
        before = count.begin()
        with self._roofline, count:
            work()
        return count.now() - before, count.peak - before

    def seconds(self, works: Sequence[tuple[Work, Work]], rounds: int) -> list[float]:
        times = []
        for prepare, work in works:
            prepare()
            before = self.spent
            self.section(work)
            times.append(self.spent - before)
        return times


class StorageTracker(TorchDispatchMode):
    """Bytes of all storages that were made inside and are alive, now and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}  # weak pointers by their addresses: none is reused while one is held
        self.peak = 0

    def begin(self) -> int:
        """Reset the peak to the bytes that are alive, and return them."""
        self.peak = self.now()
        return self.peak

    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for pointer in list(self._alive):
            storage = storage_at(pointer)
            if storage is None:
                free_weak_pointer(pointer)
                del self._alive[pointer]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE:  # fake tensors run this operator all the time
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._see(tensor.untyped_storage())
            self.peak = max(self.peak, self.now())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        pointer: Any = weak_pointer(storage)
        if pointer in self._alive:
            free_weak_pointer(pointer)  # it counts its weak references: one is enough
        else:
            self._alive[pointer] = None


class Roofline(TorchDispatchMode):
    """A mode that adds up the `seconds` operations would take, the `flops` of matrix products and attention, and `bytes` of traffic."""

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self._flops, self._bandwidth = flops, bandwidth
        self.seconds, self.flops, self.bytes = 0.0, 0, 0
        self.head_widths = Counter[int]()  # operations of fused attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is _DEVICE:
            return result
        read = {place_of(tensor): tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        writes = changes_arguments(func)
        if not outputs or (not writes and all(place_of(tensor) in read for tensor in outputs)):
            return result  # a view, or nothing
        traffic = sum(map(nbytes, [*read.values(), *outputs]))
        flops = operations(func, args, kwargs, result)
        self.flops += flops
        if "_attention" in (name := str(packet_of(func))):
            self.head_widths[args["backward" in name].shape[-1]] += flops  # its backward has the gradient in front
        self.bytes += traffic
        self.seconds += max(flops / self._flops, traffic / self._bandwidth)
        return result


def operations(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of a matrix product or of attention; 0 for others, whose time is that of memory traffic."""
    name = str(packet_of(func))
    if name.startswith(CPU_FLASH):  # torch's list has the accelerators' only
        backward = name.endswith("backward")
        q_BAND, k_BAMD, v_BAMD = args[1:4] if backward else args[:3]
        pairs = q_BAND.shape[0] * q_BAND.shape[1] * q_BAND.shape[2] * k_BAMD.shape[2]
        return int((5 if backward else 2) * pairs * (k_BAMD.shape[3] + v_BAMD.shape[3]))
    if name == GROUPED_MM:  # torch's list has none; of rows by group, each row is multiplied once
        a, b = args[:2]
        return int(2 * (b.numel() * a.shape[-2] if b.dim() < a.dim() else a.numel() * b.shape[-1]))
    from torch.utils.flop_counter import flop_registry  # here: it loads Triton

    count = flop_registry.get(packet_of(func))
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def place_of(tensor: Tensor) -> int:
    """The address of the memory of a tensor."""
    return storage_address(tensor.untyped_storage())


def nbytes(tensor: Tensor) -> int:
    """Bytes that are read or written: an expanded tensor lies in memory once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
