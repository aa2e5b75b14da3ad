"""Offloading under autograd: any order of passes, failures, threads, and nothing that is left."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmspeed.device import Device
from mmspeed.memory.offload.copies import CopyJob, CpuCopyEngine, HostBuffer
from mmspeed.memory.offload.offloader import Offloader

CPU = Device("cpu", 0)


def offload_all(**options: Any) -> Offloader:
    return Offloader(CPU, from_bytes=1, **options)


class Chain(nn.Module):
    """Layers of a matrix product and what keeps its result, each in a group of its own."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, offloader: Offloader | None = None) -> Tensor:
        for layer in self.layers:
            group = offloader.group() if offloader is not None else None
            if group is None:
                x = torch.tanh(layer(x)) * x
            else:
                with group.hooks():
                    x = torch.tanh(layer(x)) * x
                group.close()
        return x

    def gradients(self) -> list[Tensor]:
        results = [parameter.grad for parameter in self.parameters()]
        self.zero_grad()
        return results  # type: ignore[return-value]


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 32, generator=generator) for _ in range(count)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("order", [(1, 0)])
def test_two_forwards_before_two_backwards(order: tuple[int, int]) -> None:
    model, offloader, batches = Chain(4), offload_all(), inputs(2)
    sums = [model(x).sum() for x in batches]
    for number in order:
        sums[number].backward()
    wanted = model.gradients()
    sums = [model(x, offloader).sum() for x in batches]
    for number in order:
        sums[number].backward()
    assert same(model.gradients(), wanted)
    assert offloader.moved_out == offloader.moved_back + offloader.reused > 0
    assert offloader.pool.used == 0


def test_accumulation_retained_graphs_and_second_derivatives() -> None:
    model, batches = Chain(3), inputs(3)

    def gradients(offloader: Offloader | None) -> list[Tensor]:
        for x in batches:
            model(x, offloader).sum().backward()
        actual = model.gradients()
        loss = model(batches[0], offloader).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        actual += model.gradients()
        x = batches[1].clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x, offloader).sum(), x, create_graph=True)
        first.square().sum().backward()
        return [*actual, *model.gradients()]

    offloader = offload_all()
    assert same(gradients(offloader), gradients(None))
    gc.collect()
    assert offloader.pool.used == 0


def test_the_pool_does_not_grow_after_the_first_step_and_copies_no_more() -> None:
    model, offloader, (x,) = Chain(4), offload_all(), inputs(1)
    sizes, moved = [], []
    for _ in range(4):
        before = offloader.moved_out
        model(x, offloader).sum().backward()
        sizes.append((offloader.pool.bytes, offloader.pool.peak))
        moved.append(offloader.moved_out - before)
    assert len(set(sizes)) == 1
    # of a layer: what it is given and its tanh, but of the first, what the test holds goes too
    assert moved == [4 * 2 * 16 * 32 * 4] * 4
    assert not offloader._parts
    assert not offloader.leaving


def test_nothing_is_left_of_graphs_without_backward() -> None:
    model, offloader, (x,) = Chain(4), offload_all(), inputs(1)
    groups: list[weakref.ref[Any]] = []
    make = offloader.group

    def group() -> Any:
        module = make()
        groups.append(weakref.ref(module))
        return module

    offloader.group = group  # type: ignore[method-assign]
    result = model(x, offloader)
    assert offloader.pool.used > 0
    del result
    assert offloader.pool.used == 0  # at once: reference counts, no garbage collection
    assert all(weak() is None for weak in groups)
    assert not offloader._parts
    with torch.no_grad():
        model(x, offloader)
    assert offloader.pool.used == 0

    def fails() -> None:
        with offloader.group().hooks():
            torch.tanh(model(x, offloader)).exp()
            raise KeyError("in forward")

    with pytest.raises(KeyError):
        fails()
    gc.collect()
    assert offloader.pool.used == 0
    model(x, offloader).sum().backward()
    assert model.gradients()


def test_results_that_an_operator_saves_are_not_kept_alive_by_themselves() -> None:
    offloader = Offloader(CPU, from_bytes=1 << 20)
    with offloader.group().hooks():
        y = torch.ones(64, requires_grad=True).exp()  # small: it stays
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_backward_in_another_thread() -> None:
    """As autograd does on an accelerator, while the first thread makes the next graph."""
    model, offloader, batches = Chain(4), offload_all(), inputs(2)
    model(batches[0]).sum().backward()
    wanted = model.gradients()
    loss = model(batches[0], offloader).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    others = [model(batches[1], offloader) for _ in range(20)]
    thread.join()
    assert same(model.gradients(), wanted)
    del others, loss
    gc.collect()
    with offloader.lock:
        offloader.tidy()
    assert offloader.pool.used == 0


def test_low_precision_copies_of_parameters_are_cast_again() -> None:
    model, offloader, (x,) = Chain(2), offload_all(), inputs(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    wanted = model.gradients()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, offloader).sum()
    loss.backward()
    assert same(model.gradients(), wanted)
    assert offloader.recast == 32 * 32 * 2  # of the second: backward does not need the first's
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, offloader).sum()
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


class Broken:
    """Copies of which one direction fails, at once or when they are waited for."""

    def __init__(self, direction: str, at_once: bool) -> None:
        self.direction, self.at_once, self.copies = direction, at_once, CpuCopyEngine()

    def _job(self, direction: str, job: CopyJob) -> Any:
        if direction != self.direction:
            return job
        if self.at_once:
            raise OSError("the link is down")

        class Failed:
            def wait(self) -> None:
                raise OSError("the link is down")

            def done(self) -> bool:
                return True

        return Failed()

    def out(self, source_Z: Tensor, target: HostBuffer) -> Any:
        return self._job("out", self.copies.out(source_Z, target))

    def back(self, source: HostBuffer, target_Z: Tensor) -> Any:
        return self._job("back", self.copies.back(source, target_Z))


@pytest.mark.parametrize(("direction", "at_once"), [("out", True), ("back", False)])
def test_a_copy_that_fails_is_reported_and_does_not_hang(direction: str, at_once: bool) -> None:
    model, offloader, (x,) = Chain(3), offload_all(copies=Broken(direction, at_once)), inputs(1)
    with pytest.raises(OSError, match="link is down"):
        model(x, offloader).sum().backward()
    gc.collect()
    assert offloader.pool.used == 0
