"""Exchanges without a process group: arithmetic of sizes, buffers of all ranks in one process, ledgers, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed import comm
from mmspeed.comm import Axis, Ledger, even_sizes
from mmspeed.comm.packing import landing, leads, lengths_of, pack


@given(length=st.integers(0, 10_000), parts=st.integers(1, 200))
def test_even_sizes_differ_by_one_and_the_larger_come_first(length: int, parts: int) -> None:
    sizes = even_sizes(length, parts)
    assert len(sizes) == parts and sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0)])
def test_even_sizes_that_cannot_be(length: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        even_sizes(length, parts)


def _swapped(sent: list[Tensor], lengths: list[list[int]], rank: int) -> Tensor:
    """The parts of all ranks' buffers that a rank receives."""
    return torch.cat([flat.split(cut)[rank] for flat, cut in zip(sent, lengths, strict=True)])


sizes_of = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(*[st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).map(tuple)] * 3)
)


@settings(max_examples=200, deadline=None)
@given(
    sizes=sizes_of,
    dims=st.permutations(range(4)),
    rest=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    wire=st.permutations(range(4)).map(tuple),
    into=st.permutations(range(4)),
    out=st.permutations(range(4)).map(tuple),
    tensors=st.integers(1, 2),
)
def test_all_ranks_buffers_make_an_all_to_all(
    sizes: tuple[tuple[int, ...], ...],
    dims: list[int],
    rest: tuple[int, int],
    wire: tuple[int, ...],
    into: list[int],
    out: tuple[int, ...],
    tensors: int,
) -> None:
    """Any dims, sizes, order on the wire, and order in memory before and after: the parts land where they belong, in rows too."""
    gather, *scatter_each = sizes[: tensors + 1]
    (scatter_dim, gather_dim), ranks = dims[:2], range(len(gather))
    wholes = []
    for scatter in scatter_each:
        shape = [0] * 4
        shape[scatter_dim], shape[gather_dim], shape[dims[2]], shape[dims[3]] = sum(scatter), sum(gather), *rest
        wholes.append(torch.arange(math.prod(shape)).reshape(shape))
    rows = tensors > 1 and all(leads(whole.shape, gather_dim, scatter_dim, wire) for whole in wholes)
    if rows:
        wire = (gather_dim, *(dim for dim in wire if dim != gather_dim))
    back = [list(into).index(dim) for dim in range(4)]
    sent, lengths = [], []
    for rank in ranks:
        xs = [whole.split(gather, gather_dim)[rank].permute(into).contiguous().permute(back) for whole in wholes]
        packed = pack(xs, scatter_dim, scatter_each, wire, rows)
        assert packed.copies in (0, 1) and packed.copied() == packed.copies * comm.nbytes(packed.flat)
        sent.append(packed.flat)
        lengths.append(packed.lengths)
    for rank in ranks:
        wanted = [whole.split(cut, scatter_dim)[rank] for whole, cut in zip(wholes, scatter_each, strict=True)]
        shapes = [list(part.shape) for part in wanted]
        gathers = [gather] * tensors
        assert lengths_of(shapes, gather_dim, gathers) == [cut[rank] for cut in lengths]
        came = landing(sent[0], shapes, gather_dim, gathers, wire, [out] * tensors, rows)
        came.flat.copy_(_swapped(sent, lengths, rank))
        assert came.copied() in (0, comm.nbytes(came.flat)) or rows
        for result, part in zip(came.fill(), wanted, strict=True):
            assert torch.equal(result, part) and not result._is_view()
            if rows and not came.copies:  # the tensors side by side
                assert result.numel() == 0 or result.untyped_storage().data_ptr() == came.flat.data_ptr()
                assert all(
                    row.permute([d - (d > wire[0]) for d in out if d != wire[0]]).is_contiguous()
                    for row in result.unbind(wire[0])
                )
            else:
                assert rows or result.permute(out).is_contiguous()


def _axis(name: str = "a", size: int = 4, rank: int = 1, ledger: Ledger | None = None) -> Axis:
    """An axis without a group: errors are found before anything is sent."""
    return Axis(name, None, size, rank, ledger or Ledger())


X = torch.zeros(2, 6, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: comm.all_to_all(X, a, 1, 1), "scatters along one dim"),
        (lambda a: comm.all_to_all(X, a, 3, 1), "no dim 3"),
        (lambda a: comm.all_to_all(X, a, 2, 1, (2, 2, 2, 3)), "do not cut dim 2"),
        (lambda a: comm.all_to_all(X, a, 2, 1, (9, -1, 0, 0)), "do not cut dim 2"),
        (lambda a: comm.all_to_all(X, a, 2, 1, None, (6, 5, 6, 6)), "not those of 4 ranks"),
        (lambda a: comm.all_to_all(X, a, 2, 1, order=(0, 1, 1)), "does not name each"),
        (lambda a: comm.start_all_to_all_many([X, X.double()], a, 2, 1), "same number of dims"),
        (lambda a: comm.start_all_to_all_many([X, X], a, 2, 1, [None]), "scatter sizes of 1"),
        (lambda a: comm.all_gather(X, a, 1, (1, 5, 0, 0)), "not those of 4 ranks"),
        (lambda a: comm.reduce_scatter(X > 0, a, 1), "cannot be summed"),
        (lambda a: comm.pass_on([X], a, 1, 2), "cannot send to 1"),
        (lambda a: comm.pass_on([X], a, 2, 0, []), "0 shapes come"),
    ],
)
def test_what_does_not_fit_is_an_error(call: object, words: str) -> None:
    axis = _axis()
    with pytest.raises(ValueError, match=words):
        call(axis)  # type: ignore[operator]
    assert not axis.ledger.calls


def test_sizes_are_checked_on_one_rank_too() -> None:
    with pytest.raises(ValueError, match="do not cut"):
        comm.all_to_all(X, Axis.alone("a"), 2, 1, (7,))


def test_an_axis_of_one_gives_back_what_it_got_and_counts_nothing() -> None:
    axis, x = Axis.alone("a"), torch.randn(2, 6, 8, requires_grad=True)
    for y in (comm.all_to_all(x, axis, 2, 1), comm.all_gather(x, axis, 1), comm.reduce_scatter(x, axis, 1)):
        assert y is x
    assert torch.equal(comm.pass_on([x], axis, 0, 0).wait()[0], x)
    laid = comm.all_to_all(x, axis, 2, 1, order=(1, 0, 2))
    assert torch.equal(laid, x) and laid.transpose(0, 1).is_contiguous()
    assert torch.equal(torch.autograd.grad(laid.sum(), x)[0], torch.ones_like(x))
    assert not axis.ledger.calls and not axis.ledger.copies


def test_an_axis_of_one_does_not_break_a_compiled_graph() -> None:
    axis, x = Axis.alone("a"), torch.randn(2, 6, 8)

    def around(x: Tensor) -> Tensor:
        q, k = comm.finish_all(comm.start_all_to_all_many([x * 2, x + 1], axis, 2, 1))
        return comm.reduce_scatter(comm.all_gather(comm.all_to_all(q * k, axis, 1, 2), axis, 1), axis, 1)

    torch.testing.assert_close(torch.compile(around, backend="eager", fullgraph=True)(x), around(x))


def test_a_ledger_of_a_block_has_what_its_axes_counted_in_it() -> None:
    shared = Ledger()
    ring, ulysses, other = _axis("ring", ledger=shared), _axis("ulysses", ledger=shared), _axis("tp")
    ring.count("ring", 7)
    with comm.ledger(ring, ulysses) as both, comm.ledger(ulysses) as one:
        ring.count("ring", 10, packs=1, packed=5)
        ring.count("ring", 3, name="ring_inner")
        ulysses.count("all_to_all", 100, unpacks=1, unpacked=50)
        other.count("all_gather", 1000)
        assert both.total() == 113  # while it runs
        with comm.ledger(other) as third:
            other.count("all_gather", 1)
    ring.count("ring", 7)
    assert both.bytes == {("ring", "ring"): 10, ("ring", "ring_inner"): 3, ("all_to_all", "ulysses"): 100}
    assert both.calls == dict.fromkeys(both.bytes, 1)
    assert both.copies == {("ring", "ring", "pack"): 1, ("all_to_all", "ulysses", "unpack"): 1}
    assert both.copied == {("ring", "ring", "pack"): 5, ("all_to_all", "ulysses", "unpack"): 50}
    assert one.bytes == {("all_to_all", "ulysses"): 100}
    assert third.total() == 1 and other.ledger.total() == 1001
    assert shared.total() == 127 and shared.total("ring") == 24 and shared.total(kind="all_to_all") == 100


def test_a_ledger_ends_with_its_block_when_that_fails() -> None:
    axis = _axis()
    with pytest.raises(KeyError), comm.ledger(axis) as counted:
        axis.count("ring", 1)
        raise KeyError
    axis.count("ring", 1)
    assert counted.total() == 1 and axis.ledger.total() == 2
