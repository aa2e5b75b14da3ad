"""Swap the saved tensors of a span to the host's memory until backward.

Parts of storages are copied, not tensors: many saved tensors are views of the same memory (queries, keys and values of one projection;
a tensor that two operators save), which goes out once and comes back once. A part lives as long as it may be asked for, so its place
in the host's memory is free again when its graph is gone, for whatever reason.

Forward: a part's copy out begins as it is stored, and the device's memory is held until the copy is done, at the latest until the next
group but one is closed. Backward: the first tensor asked of a group begins the copies of all of its tensors; while they are taken, those of
the previous group come.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mmspeed.device import Device
from mmspeed.torch_internals import base_of, storage_address, storage_at, version_of

from .copies import CopyEngine, CopyJob, HostBuffer, HostPool, copies_for
from .storage_view import (
    StorageView,
    VersionGuard,
    cast_again,
    cast_of_parameter,
    flat_bytes,
    guarded,
    part_of_storage,
    views_parameter,
)

OPEN_GROUPS = 2  # whose copies out may be under way: the one that was closed last, and the one before


@dataclass
class PendingRelease:
    """Memory that is no longer asked for, held until copies from and to it are done."""

    jobs: list[CopyJob]
    memory_Z: Tensor | None = None
    buffer: HostBuffer | None = None
    storage: int | None = None  # address of the part's storage


def _at_end(owner: object, depot: OffloadPool, what: PendingRelease) -> weakref.finalize[..., object]:
    end = weakref.finalize(owner, depot.leave, what)
    end.atexit = False  # the process takes all memory with it
    return end


class DeviceCopy:
    """A part that is on the device, or will be when `job` is done; `memory_Z` are its bytes."""

    def __init__(self, depot: OffloadPool, memory_Z: Tensor, job: CopyJob | None = None) -> None:
        self.memory_Z, self._job = memory_Z, job
        # a copy that is never waited for may still write there
        self._unasked = None if job is None else _at_end(self, depot, PendingRelease([job], memory_Z))

    def wait(self) -> None:
        """Make work that is queued on the device from now on wait for the copy."""
        if self._job is not None and self._unasked is not None:
            self._job.wait()
            self._unasked.detach()


class OffloadedStorage:
    """Bytes of a storage that lie in the host's memory. Made under the depot's lock."""

    def __init__(self, depot: OffloadPool, tensor: Tensor, start: int, end: int) -> None:
        storage = tensor.untyped_storage()
        self.depot, self.start, self.end = depot, start, end
        self.witness = VersionGuard(tensor)
        self._storage = StorageWeakRef(storage)  # as long as it is there, no other storage has the same address
        self._arrival: weakref.ref[DeviceCopy] | None = None
        self._buffer = depot.pool.take(end - start)
        # the device's memory is held until the copy out is done
        self._lying = PendingRelease([], flat_bytes(storage, start, end), self._buffer, storage_address(storage))
        _at_end(self, depot, self._lying)
        self._out = depot.copies.out(self._lying.memory_Z, self._buffer)  # type: ignore[arg-type]
        self._lying.jobs.append(self._out)
        depot.moved_out += end - start
        self.let_go_if_done()

    def serves(self, start: int, end: int, version: int) -> bool:
        """True where bytes of the same storage, seen by a tensor of a version, are those of this part."""
        return self.start <= start and end <= self.end and version == self.witness.version and not self.witness.changed

    def let_go_if_done(self) -> bool:
        """Free the device's memory if the copy out is done; True where it is no longer held."""
        if self._lying.memory_Z is not None and self._out.done():
            self.let_go()
        return self._lying.memory_Z is None

    def let_go(self) -> None:
        """Wait for the copy out, and free the device's memory. Raises what the copy raised."""
        self._out.wait()
        self._lying.memory_Z = None

    def load(self) -> DeviceCopy:
        """Begin the copy back, if the part is not on the device. Call it under the depot's lock."""
        arrival = None if self._arrival is None else self._arrival()
        if arrival is None:
            depot, nbytes = self.depot, self.end - self.start
            present_Z = self._bytes_on_device()
            if present_Z is None:
                memory_Z = torch.empty(nbytes, dtype=torch.uint8, device=depot.device.torch_device)
                job = depot.copies.back(self._buffer, memory_Z)
                self._lying.jobs[1:] = [job]
                depot.moved_back += nbytes
                arrival = DeviceCopy(depot, memory_Z, job)
            else:
                depot.reused += nbytes
                arrival = DeviceCopy(depot, present_Z)
            self._arrival = weakref.ref(arrival)
        return arrival

    def _bytes_on_device(self) -> Tensor | None:
        """The bytes on the device, if the storage still exists elsewhere, or the copy out is under way."""
        if self.witness.changed:
            return None
        memory_Z = self._lying.memory_Z  # another thread may let it go
        if memory_Z is not None:
            return memory_Z
        storage = storage_at(self._storage.cdata)
        if storage is None or storage.nbytes() < self.end:
            return None
        return flat_bytes(storage, self.start, self.end)


class OffloadPool:
    """The offloaded data of all groups of a model: parts of storages in the host's memory, their copies, and counts in bytes.

    moved_out, moved_back: bytes copied. shared: of stored tensors whose part was stored already. reused: of parts that were asked for while
    they were still on the device. recast: of low-precision copies of parameters, which are cast again. kept_small: of tensors below
    `from_bytes`, which stay.
    """

    def __init__(self, device: Device, from_bytes: int = 1 << 20, copies: CopyEngine | None = None) -> None:
        self.device, self.from_bytes = device, from_bytes
        self.copies = copies or copies_for(device)
        self.pool = HostPool(device)
        self.moved_out = self.moved_back = self.shared = self.reused = self.recast = self.kept_small = 0
        self.lock = threading.Lock()  # backward runs in threads of autograd's
        self.leaving: deque[PendingRelease] = deque()  # filled by finalizers, which wait for no lock
        self.newest: weakref.ref[PooledOffloadGroup] | None = None
        self._parts: dict[int, list[weakref.ref[OffloadedStorage]]] = {}  # by storage
        self._outgoing: deque[weakref.ref[OffloadedStorage]] = deque()
        self._closed: deque[weakref.ref[PooledOffloadGroup]] = deque()

    def stays(self, tensor: Tensor) -> bool:
        """True where a tensor is kept as it is.

        That is: a parameter or a view of one, a leaf that requires a gradient, a small one, one not on the device, without plain memory, or
        of a sub-class (such as DTensor).
        """
        roots = [tensor] if (base := base_of(tensor)) is None else [tensor, base]
        if any(type(root) is not Tensor or (root.is_leaf and root.requires_grad) for root in roots):
            return True
        if views_parameter(tensor):
            return True
        plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_inference()
        if not plain or tensor.is_nested or tensor.device != self.device.torch_device or tensor.numel() == 0:
            return True
        start, end = StorageView.of(tensor).reach()
        if end - start < self.from_bytes:
            self.kept_small += end - start
            return True
        return tensor.untyped_storage().nbytes() < end  # was freed on purpose, to be restored later

    def part(self, tensor: Tensor) -> OffloadedStorage:
        """The part that a tensor is a view of; its copy out begins now unless it has already. Call it under the lock."""
        storage = tensor.untyped_storage()
        start, end = part_of_storage(StorageView.of(tensor), storage.nbytes())
        for weak in self._parts.get(storage_address(storage), ()):
            part = weak()
            if part is not None and part.serves(start, end, version_of(tensor)):
                self.shared += end - start
                return part
        part = OffloadedStorage(self, tensor, start, end)
        self._parts.setdefault(storage_address(storage), []).append(weakref.ref(part))
        if not part.let_go_if_done():
            self._outgoing.append(weakref.ref(part))
        return part

    def closed(self, group: PooledOffloadGroup) -> PooledOffloadGroup | None:
        """Note that a group is closed, and return the one whose copies out must be done now. Call it under the lock."""
        self._closed.append(weakref.ref(group))
        return self._closed.popleft()() if len(self._closed) > OPEN_GROUPS else None

    def tidy(self) -> None:
        """Free memory whose copies are done. Call it under the lock."""
        while self._outgoing and ((part := self._outgoing[0]()) is None or part.let_go_if_done()):
            self._outgoing.popleft()
        self._free()

    def leave(self, what: PendingRelease) -> None:
        """Release memory that is no longer asked for. For finalizers, which may run at any time, inside of the lock too."""
        self.leaving.append(what)
        if self.lock.acquire(blocking=False):
            try:
                self._free()
            finally:
                self.lock.release()

    def _free(self) -> None:
        for _ in range(len(self.leaving)):
            left = self.leaving.popleft()
            if not all(job.done() for job in left.jobs):
                self.leaving.append(left)
                continue
            if left.buffer is not None:
                self.pool.give(left.buffer)
            if left.storage is not None:
                parts = [weak for weak in self._parts.pop(left.storage, ()) if weak() is not None]
                if parts:
                    self._parts[left.storage] = parts

    def __deepcopy__(self, memo: object) -> OffloadPool:
        """A copy of a model swaps to the same place."""
        return self


class OffloadedTensor:
    """A stored tensor."""

    def __init__(self, group: PooledOffloadGroup, place: int, part: OffloadedStorage, tensor: Tensor) -> None:
        self.group, self.place, self.part = group, place, part
        self.look, self.witness = StorageView.of(tensor), VersionGuard(tensor)
        start, end = self.look.reach()
        self.nbytes = end - start
        self.arrival: DeviceCopy | None = None
        self.requested = False  # in this backward

    def load(self) -> DeviceCopy:
        """Begin to copy it back. Call it under the depot's lock."""
        if self.arrival is None:
            self.arrival = self.part.load()
        return self.arrival

    def give(self) -> Tensor:
        """The tensor, on its device. Call it any number of times; from the second call on it is copied alone."""
        self.witness.check()
        with torch.no_grad():
            arrival = self.group.ask(self)
            arrival.wait()
            return self.look.into(arrival.memory_Z, self.part.start)


class OffloadGroup(Protocol):
    """The tensors of one span of one forward pass in the host's memory."""

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor out; the result returns it, on its device. A tensor that stays is kept as it is."""
        ...

    def close(self) -> None:
        """Note that the span's forward is done."""
        ...

    def fetch(self) -> None:
        """Begin to copy the span's tensors back, and those of the span before it, once backward has reached the span."""
        ...

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that store all that autograd saves inside of them."""
        ...


class PooledOffloadGroup:
    """The tensors of one run of a span in the host's memory; an `OffloadGroup`. Only those that may ask for its tensors hold it."""

    def __init__(self, depot: OffloadPool) -> None:
        self.depot = depot
        self._held: list[weakref.ref[OffloadedTensor]] = []
        self._before: Callable[[], PooledOffloadGroup | None] = lambda: None
        self._nbytes = 0
        self._begun = self._forward = False
        self._requested = 0  # of those stored, since it was begun

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor out; the result returns it. Raises UserError when the host's memory is full."""
        depot = self.depot
        with torch.no_grad(), depot.lock:
            if depot.stays(tensor):
                return guarded(tensor)
            source = cast_of_parameter(tensor)
            if source is not None:
                depot.recast += tensor.numel() * tensor.element_size()
                return cast_again(tensor, source)
            depot.tidy()
            held = OffloadedTensor(self, len(self._held), depot.part(tensor), tensor)
            if not self._held:  # a group that keeps nothing would break the chain
                self._before = depot.newest or self._before
                depot.newest = weakref.ref(self)
            self._held.append(weakref.ref(held))
            self._nbytes += held.nbytes

        def give() -> Tensor:
            return held.give()

        return give

    def close(self) -> None:
        """Note that the span's forward is done."""
        with self.depot.lock:
            self.depot.tidy()
            old = self.depot.closed(self)
        if old is not None:
            for held in old._alive():
                held.part.let_go()

    def fetch(self) -> None:
        """Begin to copy the tensors back, in their order, and then those of the group before."""
        with torch.no_grad(), self.depot.lock:
            self._fetch(forward=True)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that store all that autograd saves inside of them."""
        return torch.autograd.graph.saved_tensors_hooks(self.store, lambda give: give())

    def ask(self, held: OffloadedTensor) -> DeviceCopy:
        """The copy of a tensor that is needed now. `held` no longer holds the copy that was loaded for it."""
        with self.depot.lock:
            # a second pass asks for the first, backward for the last
            self._fetch(forward=2 * held.place < len(self._held))
            arrival, held.arrival = held.load(), None
            self._requested += not held.requested
            held.requested = True
            self._prefetch()
            if self._requested == len(self._held):  # a second backward (retain_graph) starts over
                self._begun, self._requested = False, 0
                for other in self._alive():
                    other.requested = False
            self.depot.tidy()  # not before: what the last groups of forward stored may be on the device still
        return arrival

    def _fetch(self, forward: bool) -> None:
        if not self._begun:
            self._begun, self._forward = True, forward
            self._load(forward)
            self._prefetch()

    def _prefetch(self) -> None:
        """Load the previous group.

        All of it where a second pass takes all of this one at once; else as many bytes as this group no longer waits for, so that the bytes
        of one group are on the device and not of two.
        """
        before = self._before()
        if before is not None and not before._begun:
            waiting = 0 if self._forward else sum(held.nbytes for held in self._alive() if not held.requested)
            before._load(self._forward, before._nbytes * (1 - waiting / self._nbytes))

    def _load(self, forward: bool, nbytes: float | None = None) -> None:
        """Begin the copies back, of at least so many bytes; None: of all."""
        held, begun = self._alive(), 0
        for one in held if forward else reversed(held):
            if nbytes is not None and begun >= nbytes:
                return
            one.load()
            begun += one.nbytes

    def _alive(self) -> list[OffloadedTensor]:
        return [held for weak in self._held if (held := weak()) is not None]


class Offloader(OffloadPool):
    """The pool that a model's spans swap to. Tensors of fewer than `from_bytes` stay."""

    def group(self) -> OffloadGroup:
        """A new group, for one run of a span."""
        return PooledOffloadGroup(self)
