"""Offloading under a controlled clock: what is hidden behind the computation, and that no memory is used or freed too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.device import Device
from mmspeed.memory.offload.copies import CpuCopyEngine, HostBuffer
from mmspeed.memory.offload.offloader import Offloader, PooledOffloadGroup
from tests.support.clock import ControlledClock, Reckoned

CPU = Device("cpu", 0)
LAYERS, COMPUTE = 9, 0.024  # seconds of a layer, forward as backward
NUMBERS = 1 << 14  # of a layer's saved tensors


class Timed(torch.autograd.Function):
    """x (N,) -> 2 x + 1 by work that takes its time, forward and backward; saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[], None]) -> Tensor:
        compute()
        ctx.save_for_backward(x)
        ctx.compute = compute
        return 2 * x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.compute()
        return 2 * grads[0] + x, None


def step(
    x: Tensor, offloader: Offloader | None, compute: Callable[[], None], parts: int, keep_last: bool = True
) -> Tensor:
    """Gradient of a chain of layers of so many functions each."""
    leaf = x.clone().requires_grad_()
    y = leaf * 1
    for layer in range(LAYERS):
        group = offloader.group() if offloader is not None and not (keep_last and layer == LAYERS - 1) else None
        for _ in range(parts):
            if group is None:
                y = Timed.apply(y, compute)
            else:
                with group.hooks():
                    y = Timed.apply(y, compute)
        if group is not None:
            group.close()
    y.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def exposed(parts: int, share: float, keep_last: bool = True) -> float:
    """What offloading adds to a step, over the time of all copies; a layer's copies take `share` of its computation."""
    clock = Reckoned(NUMBERS * 4 * parts / (share * COMPUTE))
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    offloader = Offloader(CPU, from_bytes=1, copies=clock)
    step(x, offloader, lambda: clock.compute(COMPUTE / parts), parts, keep_last)
    assert offloader.moved_back + offloader.reused == offloader.moved_out
    added = clock.now - 2 * LAYERS * COMPUTE
    assert clock.copying > 0.8 * 2 * (LAYERS - 2) * share * COMPUTE
    return added / clock.copying


@pytest.mark.parametrize(("parts", "share"), [(1, 0.95), (3, 0.5)])
def test_offloading_hides_behind_the_computation(monkeypatch: pytest.MonkeyPatch, parts: int, share: float) -> None:
    """All of it: what the newest group stored is on the device when backward comes to it, and one group ahead is enough."""
    assert abs(exposed(parts, share)) < 1e-6
    assert abs(exposed(parts, share, keep_last=False)) < 1e-6
    monkeypatch.setattr(PooledOffloadGroup, "_prefetch", lambda self: None)
    assert exposed(parts, share) >= 0.4 / parts  # of copies back, all of a layer's first one


@pytest.mark.parametrize(("parts", "keep_last"), [(1, True), (3, False)])
def test_copies_slower_than_the_computation_are_waited_for(parts: int, keep_last: bool) -> None:
    """The clock puts rubbish where a copy is under way, and raises for memory that was freed too early."""
    clock = ControlledClock(NUMBERS * 4 / 0.004)
    offloader = Offloader(CPU, from_bytes=1, copies=clock)
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    wanted = step(x, None, lambda: None, parts)
    for _ in range(3):
        assert torch.equal(step(x, offloader, lambda: None, parts, keep_last), wanted)
    assert clock.faults == []
    assert offloader.moved_back > 0


def test_graphs_that_are_dropped_while_they_are_copied() -> None:
    clock = ControlledClock(NUMBERS * 4 / 0.001)
    offloader = Offloader(CPU, from_bytes=1, copies=clock)
    group = offloader.group()
    let_go = clock.hold()
    give = group.store(torch.ones(NUMBERS))
    other = group.store(torch.ones(NUMBERS))
    del give, other  # forward's copies are under way
    assert offloader.pool.used == 2 * 4 * NUMBERS
    let_go()
    give, other = group.store(torch.ones(NUMBERS)), group.store(torch.zeros(NUMBERS))
    assert offloader.pool.used == 2 * 4 * NUMBERS  # of the first two no more
    clock.finish()
    with offloader.lock:
        offloader.tidy()
    assert torch.equal(other(), torch.zeros(NUMBERS))
    del give, other, group  # one copy back is under way, for nobody
    clock.finish()
    with offloader.lock:
        offloader.tidy()
    assert clock.faults == []
    assert offloader.pool.used == 0
    assert not offloader.leaving


class Deferred:
    """Copies that are made when they are waited for, and never before: what does not wait finds nothing."""

    def __init__(self) -> None:
        self.copies, self.waited = CpuCopyEngine(), 0

    def _job(self, copy: Callable[[], object]) -> Any:
        outer, left = self, [copy]

        class Waiting:
            def wait(self) -> None:
                if left:
                    left.pop()()
                    outer.waited += 1

            def done(self) -> bool:
                return not left

        return Waiting()

    def out(self, source_Z: Tensor, target: HostBuffer) -> Any:
        return self._job(lambda: self.copies.out(source_Z, target))

    def back(self, source: HostBuffer, target_Z: Tensor) -> Any:
        return self._job(lambda: self.copies.back(source, target_Z))


@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_hangs_on_asking_whether_a_copy_is_done(parts: int) -> None:
    """As on a device that is far behind the host: memory is let go after waiting alone, two groups later."""
    offloader = Offloader(CPU, from_bytes=1, copies=Deferred())
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    wanted = step(x, None, lambda: None, parts)
    assert torch.equal(step(x, offloader, lambda: None, parts, keep_last=False), wanted)
    nbytes = NUMBERS * 4 * parts
    assert (offloader.moved_out, offloader.reused, offloader.moved_back) == (
        LAYERS * nbytes,
        2 * nbytes,
        (LAYERS - 2) * nbytes,
    )
    assert offloader.copies.waited >= 2 * (LAYERS - 2) * parts  # type: ignore[attr-defined]
