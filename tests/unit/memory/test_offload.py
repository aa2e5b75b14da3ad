"""Offloaded tensors: they come back bit for bit, nothing is copied twice, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmspeed.device import Device
from mmspeed.memory.offload.offloader import Offloader

CPU = Device("cpu", 0)
DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip


def offload_all(**options: Any) -> Offloader:
    return Offloader(CPU, from_bytes=1, **options)


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


@st.composite
def views(draw: st.DrawFn) -> Callable[[], Tensor]:
    """Any look into a storage of random bytes: overlapping, expanded, with gaps, of no or of no more than one number."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    offset, after = draw(st.integers(0, 2000)), draw(st.integers(0, 700))
    seen = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    seed, turn = (
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(["", "conjugate", "negative"])) if dtype.is_complex else "",
    )

    def make() -> Tensor:  # what hypothesis hands over it also holds
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, ((offset + seen + after) * dtype.itemsize,), generator=generator)
        tensor = (raw.bool() if dtype == torch.bool else raw.to(torch.uint8).view(dtype)).as_strided(
            shape, strides, offset
        )
        return {"conjugate": tensor.conj, "negative": lambda: tensor.conj().imag}[turn]() if turn else tensor

    return make


@given(views())
def test_any_look_into_a_storage_comes_back_bit_for_bit(make: Callable[[], Tensor]) -> None:
    offloader, tensor = offload_all(), make()
    wanted, shape, strides, dtype = bits(tensor).clone(), tensor.shape, tensor.stride(), tensor.dtype
    seen = 0
    if tensor.numel():
        seen = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    most = max(2 * seen * tensor.element_size(), seen * tensor.element_size() + 512)
    group = offloader.group()
    give = group.store(tensor)
    del tensor
    back = give()
    assert (back.shape, back.stride(), back.dtype) == (shape, strides, dtype)
    assert torch.equal(bits(back), wanted)
    assert (offloader.moved_back > 0) == (seen > 0)
    assert offloader.moved_out == offloader.moved_back <= most  # never an expansion, never much that nobody sees
    del give
    assert offloader.pool.used == 0


def test_what_stays_is_not_copied_and_is_the_same_memory() -> None:
    class Other(Tensor):
        pass

    weight, leaf = nn.Parameter(torch.ones(4, 4)), torch.ones(8, requires_grad=True)
    staying = [
        weight, weight.t(), weight[1:], leaf, leaf[2:], torch.ones(3), torch.empty(0), torch.ones(64).as_subclass(Other),
        torch.ones(4, 4, device="meta"), torch.ones(1).expand(100), torch.ones(8, 8).to_sparse(),
    ]  # fmt: skip
    offloader = Offloader(CPU, from_bytes=16)
    group = offloader.group()
    for tensor in staying:
        back = group.store(tensor)()
        assert back is tensor or back.data_ptr() == tensor.data_ptr()
        assert type(back) is type(tensor) or isinstance(tensor, nn.Parameter)
    assert offloader.moved_out == 0
    assert offloader.kept_small == 12 + 4  # bytes: the expansion of one number is one number
    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)  # whoever freed it restores it
    assert group.store(freed)() is freed


def test_views_of_one_memory_go_once_and_come_once() -> None:
    offloader = offload_all()
    qkv = torch.randn(5, 3 * 64)
    q, k, v = qkv.chunk(3, dim=-1)
    wanted = [tensor.clone() for tensor in (q, k, v, qkv)]
    group = offloader.group()
    gives = [group.store(tensor) for tensor in (q, k, v, qkv)]
    nbytes = qkv.numel() * 4
    assert offloader.moved_out == nbytes == offloader.pool.used
    assert offloader.shared > nbytes
    del q, k, v, qkv
    back = [give() for give in gives]
    assert offloader.moved_back == nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(back[3:], wanted[3:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))


def test_a_small_part_of_a_large_memory_goes_alone() -> None:
    offloader = offload_all()
    large = torch.randn(100, 256)  # rows of 1024 bytes
    group = offloader.group()
    first, again, other = group.store(large[10:20]), group.store(large[12:15]), group.store(large[50:55])
    assert offloader.moved_out == (10 + 5) * 1024
    wanted = large.clone()
    del large
    assert torch.equal(first(), wanted[10:20])
    assert torch.equal(again(), wanted[12:15])
    assert torch.equal(other(), wanted[50:55])


def test_groups_share_what_an_earlier_one_stored() -> None:
    """The caption that all blocks meet lies in the host's memory once."""
    offloader, text = offload_all(), torch.randn(64)
    gives = [offloader.group().store(text) for _ in range(5)]
    wanted = text.clone()
    assert (offloader.moved_out, offloader.shared) == (256, 4 * 256)
    del text
    assert all(torch.equal(give(), wanted) for give in gives)
    del gives
    assert offloader.pool.used == 0


def test_another_memory_at_the_same_place_is_not_taken_for_the_first() -> None:
    offloader = offload_all()
    gives, wanted = [], []
    for number in range(50):  # torch's allocator gives the same address again
        tensor = torch.full((64,), float(number))
        gives.append(offloader.group().store(tensor))
        wanted.append(number)
        del tensor
    assert [int(give()[0]) for give in gives] == wanted
    assert offloader.shared == 0


def test_memory_that_was_changed_between_two_stores_goes_twice() -> None:
    offloader = offload_all()
    tensor = torch.zeros(64)
    group = offloader.group()
    old = group.store(tensor)
    tensor.add_(1)
    new = group.store(tensor)
    assert offloader.moved_out == 2 * 256
    del tensor
    assert torch.equal(new(), torch.ones(64))
    with pytest.raises(RuntimeError, match="changed in place"):
        old()


@pytest.mark.parametrize("from_bytes", [1, 1 << 20])
def test_a_change_in_place_is_noticed_as_autograd_does(from_bytes: int) -> None:
    """Of a tensor that went, and of one that stayed."""
    offloader = Offloader(CPU, from_bytes)
    x = torch.randn(64, requires_grad=True)
    with offloader.group().hooks():
        y = x.exp()
        z = y.square()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_the_devices_memory_is_free_at_once_on_a_cpu_and_what_others_hold_is_not_copied_back() -> None:
    offloader = offload_all()
    held, dropped = torch.randn(64), torch.randn(64)
    group = offloader.group()
    gives = [group.store(held), group.store(dropped)]
    storage = StorageWeakRef(dropped.untyped_storage())
    del dropped
    assert storage.expired()
    back = [give() for give in gives]
    assert back[0].data_ptr() == held.data_ptr()
    assert (offloader.moved_out, offloader.moved_back, offloader.reused) == (512, 256, 256)


def test_memory_that_others_hold_but_freed_or_changed_comes_from_the_host() -> None:
    offloader = offload_all()
    freed, changed = torch.ones(64), torch.ones(64)
    other = changed.data  # counts its changes for itself
    group = offloader.group()
    gives = [group.store(freed), group.store(changed), group.store(other)]
    freed.untyped_storage().resize_(0)
    changed.add_(1)
    assert torch.equal(gives[0](), torch.ones(64))
    assert torch.equal(gives[2](), torch.ones(64))
    assert offloader.reused == 0
    with pytest.raises(RuntimeError, match="changed in place"):
        gives[1]()
