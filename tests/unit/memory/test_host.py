"""The host's memory: buffers cut from slabs, and the order in which streams copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory.offload import copies as host
from mmspeed.memory.offload.copies import (
    ALIGNMENT,
    CpuCopyEngine,
    HostBuffer,
    HostPool,
    StreamCopyEngine,
    copies_for,
)

CPU = Device("cpu", 0)


@given(st.lists(st.one_of(st.integers(0, 5000), st.tuples(st.integers(0, 30))), max_size=60))
def test_buffers_never_overlap_and_all_room_comes_back(steps: list[Any]) -> None:
    """An integer takes a buffer of so many bytes, a tuple gives one of those in use back."""
    pool, held = HostPool(CPU), []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            buffer = pool.take(step)
            assert buffer.array.nbytes == step == buffer.nbytes
            assert buffer.start % ALIGNMENT == 0
            buffer.array[:] = number % 251
            held.append((buffer, number % 251))
        elif held:
            buffer, mark = held.pop(step[0] % len(held))
            assert (buffer.array == mark).all()
            pool.give(buffer)
        assert pool.used == sum(buffer.nbytes for buffer, _ in held)
    assert all((buffer.array == mark).all() for buffer, mark in held)
    for buffer, _ in held:
        pool.give(buffer)
    assert pool.used == 0
    assert all(slab.idle for slab in pool._slabs)
    before = pool.bytes
    pool.trim()
    assert pool.bytes == 0 or before == 0


def test_a_pool_does_not_grow_for_other_sizes_that_fit() -> None:
    """Videos of other shapes take other sizes; exact sizes would each get memory of their own."""
    pool = HostPool(CPU)
    for sizes in ([100_000, 50_000, 25_000], [30_000] * 5, [120_000], [1000] * 100):
        buffers = [pool.take(size) for size in sizes]
        for buffer in buffers:
            pool.give(buffer)
    assert pool.bytes == 131072 + 65536  # of the first round, none later
    assert pool.peak == 175_000


def test_a_full_host_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(CPU)
    pool.take(1000)
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 4096)
    with pytest.raises(UserError, match=r"host's memory is full.*memory\.activation_policy"):
        pool.take(1 << 20)
    assert pool.used == 1000  # what was not given is not counted
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 1 << 40)

    def no_memory(*args: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host, "HostBuffer", no_memory)  # as page-locked memory fails
    with pytest.raises(UserError, match="raise the number of hosts"):
        HostPool(CPU, advice="raise the number of hosts").take(1 << 20)


def test_copies_of_a_cpu_are_done_at_once() -> None:
    source, buffer = torch.arange(200, dtype=torch.uint8), HostBuffer(256, pinned=False)
    copies = copies_for(CPU)
    assert isinstance(copies, CpuCopyEngine)
    assert copies.out(source, buffer).done()
    target = torch.zeros(200, dtype=torch.uint8)
    assert copies.back(buffer, target).done()
    assert torch.equal(source, target)
    source.untyped_storage().resize_(0)  # others free and restore what was copied
    with pytest.raises(ValueError, match="do not fit into"):
        copies.out(torch.zeros(300, dtype=torch.uint8), buffer)


class Streams:
    """Stand-ins for a device's streams: what each is given, in the order of the host's calls."""

    def __init__(self) -> None:
        self.log: list[tuple[Stream, str, Any]] = []
        self.compute, self.current = Stream(self, "compute"), Stream(self, "none")
        self.current = self.compute

    def add(self, stream: Stream, kind: str, what: Any = None) -> int:
        self.log.append((stream, kind, what))
        return len(self.log) - 1

    def before(self, early: int, late: int) -> bool:
        """Whether the device must have done one thing before it begins another, however slow each stream is."""
        stream, open_, seen = self.log[late][0], [late], set()
        while open_:
            place = open_.pop()
            if place in seen:
                continue
            seen.add(place)
            stream, kind, what = self.log[place]
            earlier = [number for number in range(place) if self.log[number][0] is stream]
            open_ += earlier[-1:] + ([what.place] if kind == "wait" else [])
        return early in seen

    def find(self, kind: str) -> list[int]:
        return [number for number, entry in enumerate(self.log) if entry[1] == kind]


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> Any:
        return SimpleNamespace(place=self.streams.add(self, "event"), query=lambda: False)

    def wait_event(self, event: Any) -> None:
        self.streams.add(self, "wait", event)

    def __enter__(self) -> None:
        self._outer, self.streams.current = self.streams.current, self

    def __exit__(self, *raised: object) -> None:
        self.streams.current = self._outer


class Copied(TorchDispatchMode):
    """Notes each copy on the stream that is current."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert (kwargs or {}).get("non_blocking") or args[2:] == (True,)
            self.streams.add(self.streams.current, "copy")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    names = iter(("out", "back"))
    monkeypatch.setattr(Device, "side_stream", lambda self: Stream(streams, next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: streams.current)
    return streams


def pinned_stand_in(nbytes: int) -> HostBuffer:
    buffer = HostBuffer(nbytes, pinned=False)
    buffer.tensor = torch.from_numpy(buffer.array)
    return buffer


def test_streams_copy_after_what_was_queued_and_are_waited_for_by_what_follows(streams: Streams) -> None:
    copies = StreamCopyEngine(Device("cuda", 0))
    buffer, source_Z = pinned_stand_in(64), torch.arange(64, dtype=torch.uint8)
    with Copied(streams):
        event = streams.add(streams.compute, "kernel")
        out = copies.out(source_Z, buffer)
        beside = streams.add(streams.compute, "kernel")
        out.wait()
        reused = streams.add(streams.compute, "kernel")  # may overwrite the source
        target_Z: Tensor = torch.zeros(64, dtype=torch.uint8)
        back = copies.back(buffer, target_Z)
        early = streams.add(streams.compute, "kernel")
        back.wait()
        used = streams.add(streams.compute, "kernel")
    copied_out, copied_back = streams.find("copy")
    assert [streams.log[place][0].name for place in (copied_out, copied_back)] == ["out", "back"]
    assert streams.before(event, copied_out)
    assert not streams.before(copied_out, beside)  # the computation goes on
    assert streams.before(copied_out, reused)
    assert streams.before(copied_out, copied_back)  # by the computation, which has waited
    assert streams.before(reused, copied_back)  # the target's memory may be in use until then
    assert not streams.before(copied_back, early)
    assert streams.before(copied_back, used)
    assert not out.done()
    assert np.array_equal(target_Z.numpy(), np.arange(64, dtype=np.uint8))
