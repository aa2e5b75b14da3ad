"""Copies under a controlled clock: each takes its bytes' time, one after another in each direction, beside what computes.

What a device would do to a careless caller is done here too: a target holds rubbish until its copy is done, a source is read at the end
only, and a device tensor that was freed before raises. Use as `copies=` of what is tested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mmspeed.memory.offload.copies import CpuCopyEngine, HostBuffer

RUBBISH = 0xA5


def sleep_until(moment: float) -> None:
    """Return at a moment of `time.perf_counter`, not before."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class _Lane:
    """One direction. A copy ends `nbytes / bandwidth` seconds after it was asked for, or after the one before it has ended."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth  # bytes per second
        self.bytes = 0
        self._free = 0.0
        self._thread = ThreadPoolExecutor(1)

    def begin(self, nbytes: int, spoil: Callable[[], None], copy: Callable[[], None]) -> _ClockJob:
        seconds = nbytes / self.bandwidth
        self.bytes += nbytes
        self._free = end = max(self._free, time.perf_counter()) + seconds

        def work() -> None:
            spoil()
            sleep_until(end)
            copy()

        return _ClockJob(self.queue(work))

    def queue(self, work: Callable[[], Any]) -> Future[Any]:
        """Do `work` behind the copies that were asked for."""
        return self._thread.submit(work)


class _ClockJob:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ControlledClock:
    """`Copies` of a CPU whose bandwidths (bytes per second) are set. `outward` and `inward` count bytes."""

    def __init__(self, out_bandwidth: float, back_bandwidth: float | None = None) -> None:
        self.outward = _Lane(out_bandwidth)
        self.inward = _Lane(out_bandwidth if back_bandwidth is None else back_bandwidth)
        self.faults: list[str] = []

    def out(self, source_Z: Tensor, target: HostBuffer) -> _ClockJob:
        """To the host's memory."""
        look, nbytes = self._weak(source_Z, "source"), source_Z.numel()

        def spoil() -> None:
            target.array[:nbytes] = RUBBISH

        def copy() -> None:
            np.copyto(target.array[:nbytes], look())

        return self.outward.begin(nbytes, spoil, copy)

    def back(self, source: HostBuffer, target_Z: Tensor) -> _ClockJob:
        """To the device."""
        look, nbytes = self._weak(target_Z, "target"), target_Z.numel()

        def spoil() -> None:
            look()[:] = RUBBISH

        def copy() -> None:
            np.copyto(look(), source.array[:nbytes])

        return self.inward.begin(nbytes, spoil, copy)

    def hold(self) -> Callable[[], None]:
        """Begin no copy out of the device that is asked for from here on, until the returned function is called; it returns when they are done."""
        gate = threading.Event()
        self.outward.queue(gate.wait)

        def let_go() -> None:
            gate.set()
            self.finish()

        return let_go

    def finish(self) -> None:
        """Wait for all copies that were asked for."""
        for lane in (self.outward, self.inward):
            lane.queue(int).result()

    def _weak(self, tensor_Z: Tensor, side: str) -> Callable[[], np.ndarray]:
        """The bytes of a tensor that is not kept alive; looking raises AssertionError when it is gone."""
        assert tensor_Z.dtype == torch.uint8 and tensor_Z.ndim == 1 and tensor_Z.is_contiguous()
        start, nbytes = tensor_Z.storage_offset(), tensor_Z.numel()
        weak = StorageWeakRef(tensor_Z.untyped_storage())

        def look() -> np.ndarray:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                self.faults.append(f"the {side} of a copy of {nbytes} bytes was freed before it was done")
                raise AssertionError(self.faults[-1])
            return torch.empty(0, dtype=torch.uint8).set_(storage, start, (nbytes,), (1,)).numpy()

        return look


class Reckoned:
    """Copies on a clock that is reckoned and not waited for, so that a busy machine changes nothing. `now`: the computation's time."""

    def __init__(self, out_bandwidth: float, back_bandwidth: float | None = None) -> None:
        self.bandwidth = {"out": out_bandwidth, "back": back_bandwidth or out_bandwidth}
        self.now = 0.0
        self.seconds = {"out": 0.0, "back": 0.0, "compute": 0.0}
        self._free = {"out": 0.0, "back": 0.0}

    @property
    def copying(self) -> float:
        """Seconds of all copies."""
        return self.seconds["out"] + self.seconds["back"]

    def compute(self, seconds: float) -> None:
        """Work of the device that takes so long."""
        self.now += seconds
        self.seconds["compute"] += seconds

    def _job(self, direction: str, nbytes: int) -> _ReckonedJob:
        seconds = nbytes / self.bandwidth[direction]
        self.seconds[direction] += seconds
        self._free[direction] = max(self._free[direction], self.now) + seconds
        return _ReckonedJob(self, self._free[direction])

    def out(self, source_Z: Tensor, target: HostBuffer) -> _ReckonedJob:
        """To the host's memory."""
        CpuCopyEngine().out(source_Z, target)
        return self._job("out", source_Z.numel())

    def back(self, source: HostBuffer, target_Z: Tensor) -> _ReckonedJob:
        """To the device."""
        CpuCopyEngine().back(source, target_Z)
        return self._job("back", target_Z.numel())


class _ReckonedJob:
    def __init__(self, clock: Reckoned, end: float) -> None:
        self._clock, self._end = clock, end

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._end)

    def done(self) -> bool:
        return self._clock.now >= self._end


class ReckonedGroup:
    """The process group of an axis whose ranks all hold what this one holds; messages take their time on the clock, beside what computes.

    A receiving buffer holds NaN until its message is waited for, and what is sent is read no earlier. `events` has what was issued,
    computed and waited for, in this order; any other question to a message is a wait of the host.
    """

    def __init__(self, bandwidth: float, size: int, rank: int = 0) -> None:
        self.clock, self.size, self.rank = Reckoned(bandwidth), size, rank
        self.events: list[str] = []
        self.host_waits = 0

    def compute(self, seconds: float) -> None:
        """Work of the device that takes so long."""
        self.events.append("compute")
        self.clock.compute(seconds)

    def _issue(self, output: Tensor, whole: Tensor, arrives: Callable[[], Tensor]) -> _ReckonedWork:
        """`whole`: the one of both buffers that has parts of all ranks."""
        self.events.append("issue")
        if output.is_floating_point():
            output.fill_(torch.nan)
        job = self.clock._job("out", whole.numel() * whole.element_size() * (self.size - 1) // self.size)
        return _ReckonedWork(self, job, lambda: output.copy_(arrives()))

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, comes: Sequence[int], sends: Sequence[int], _: Any
    ) -> _ReckonedWork:
        assert list(comes) == [sends[self.rank]] * self.size
        return self._issue(output, sent, lambda: torch.cat([sent.split(list(sends))[self.rank]] * self.size))

    def all_gather_single(self, output: Tensor, sent: Tensor, _: Any) -> _ReckonedWork:
        return self._issue(output, output, lambda: torch.cat([sent] * self.size))

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, _: Any) -> _ReckonedWork:
        return self._issue(output, sent, lambda: sent.chunk(self.size)[self.rank] * self.size)

    # as older torch names them
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


class _ReckonedWork:
    def __init__(self, group: ReckonedGroup, job: _ReckonedJob, arrive: Callable[[], object]) -> None:
        self._group, self._job, self._arrive = group, job, arrive

    def wait(self) -> None:
        """Order what is computed from now on behind the message."""
        self._group.events.append("wait")
        self._job.wait()
        self._arrive()

    def __getattr__(self, name: str) -> Any:
        self._group.host_waits += 1
        raise AssertionError(f"the host asks a message for {name}")
