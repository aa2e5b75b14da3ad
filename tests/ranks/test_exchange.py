"""Exchanges on 2 and 4 processes: values, gradients, bytes and copies against one process that has it all."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed import comm
from mmspeed.comm import Axis, ExchangeMethod, RowCounts, even_sizes, finish, finish_all, messages
from mmspeed.comm.groups import flattened
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks

WORLDS = (2, 4)
WAYS: tuple[ExchangeMethod, ...] = ("collective", "point_to_point")
BSH, SBH = (0, 1, 2), (1, 0, 2)  # the dims of a (B, S, H) tensor from the outermost in memory to the innermost


class Copied(TorchDispatchMode):
    """Counts the bytes that torch itself copies within this process, by any operator that gives new memory its contents."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in ("copy_", "clone", "cat", "_to_copy", "contiguous", "_reshape_copy"):
            self.bytes += comm.nbytes(result)
        return result


def _cuts(length: int, ranks: int) -> list[tuple[int, ...]]:
    """Even, uneven, and with empty parts, first and last."""
    return [
        even_sizes(length, ranks),
        (length - ranks + 1, *(1,) * (ranks - 1)),
        (0, *even_sizes(length, ranks - 1)),
        (*(0,) * (ranks - 1), length),
    ]


def _part(x: Tensor, sizes: tuple[int, ...], dim: int, rank: int) -> Tensor:
    return x.split(sizes, dim)[rank].clone()


def _laid(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers, contiguous in this order of the dims."""
    inverse = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(inverse)


def _noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _grad(result: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x as the exchange gives it, before torch changes its layout."""
    return torch.autograd.grad((result * weight).sum(), x)[0]


# Every case runs on all ranks, for both ways of exchange, and asserts there.


def _case_all_to_all(axis: Axis) -> None:
    """Every cut of both dims, and orders in memory of input and result: values, gradients, strides, bytes, copies."""
    n, r = axis.size, axis.rank
    whole, weight = _noise(2, 9, 6, seed=1), _noise(2, 9, 6, seed=2)
    cuts = zip(_cuts(9, n), reversed(_cuts(6, n)), strict=True)
    for (gather, scatter), into, order in itertools.product(cuts, (BSH, SBH, (2, 1, 0)), (None, BSH, SBH, (2, 0, 1))):
        x = _laid(_part(whole, gather, 1, r), into).requires_grad_()
        with comm.ledger(axis) as forward:
            y = comm.all_to_all(x, axis, 2, -2, scatter, gather, order)
        assert torch.equal(y, _part(whole, scatter, 2, r))
        assert y.permute(order or BSH).is_contiguous()
        assert forward.bytes == {("all_to_all", "a"): 8 * 2 * gather[r] * (6 - scatter[r])}
        with comm.ledger(axis) as back:
            grad = _grad(y, x, _part(weight, scatter, 2, r))
        assert torch.equal(grad, _part(weight, gather, 1, r))
        assert grad.permute(into).is_contiguous()
        assert back.bytes == {("all_to_all", "a"): 8 * 2 * scatter[r] * (9 - gather[r])}
        for counted in (forward, back):
            assert counted.calls == {("all_to_all", "a"): 1}
            assert max(counted.copies.values(), default=0) <= 1


def _case_rows(axis: Axis) -> None:
    """Several tensors whose joined dim comes first on the way: one copy before, none after; and back, none before and one after."""
    n, r = axis.size, axis.rank
    for heads, tokens, cuts in (((7, 5, 5), 11, False), ((2 * n, n, n), 2 * n, True), ((n, n, n), n - 1, False)):
        sequence = even_sizes(tokens, n) if n > 2 or cuts else (0, tokens)
        each = [even_sizes(count, n) for count in heads]
        wholes = [_noise(2, count, tokens, 2 + place, seed=place) for place, count in enumerate(heads)]
        weights = [_noise(*whole.shape, seed=9 + place) for place, whole in enumerate(wholes)]
        first, bsh = (2, 0, 1, 3), (0, 2, 1, 3)  # tokens first, or those of one sample
        for apart, order, back in itertools.product((False, True), (first, bsh), (None, first)):
            xs = [_laid(_part(whole, sequence, 2, r), bsh).requires_grad_() for whole in wholes]
            with comm.ledger(axis) as forward:
                ys = comm.finish_all(
                    comm.start_all_to_all_many(
                        xs, axis, 1, 2, each, sequence, order, wire=first, grad_order=back, apart=apart
                    )
                )
            joined = sum(map(comm.nbytes, ys))
            for y, whole, sizes in zip(ys, wholes, each, strict=True):
                assert torch.equal(y, _part(whole, sizes, 1, r)) and not y._is_view()
                if apart or order != first:
                    assert y.permute(order).is_contiguous()
            assert forward.copies["all_to_all", "a", "pack"] == 1 and forward.calls == {("all_to_all", "a"): 1}
            assert forward.copied["all_to_all", "a", "pack"] == sum(map(comm.nbytes, xs))
            assert forward.copied["all_to_all", "a", "unpack"] == (0 if order == first or tokens == 1 else joined)
            # gradients that lie with their tokens first travel from where they are
            dys = [_laid(_part(w, sizes, 1, r), first) for w, sizes in zip(weights, each, strict=True)]
            with comm.ledger(axis) as gone:
                grads = torch.autograd.grad(ys, xs, dys)
            for grad, weight in zip(grads, weights, strict=True):
                assert torch.equal(grad, _part(weight, sequence, 2, r)) and grad.permute(back or bsh).is_contiguous()
            assert gone.copied == ({("all_to_all", "a", "unpack"): sum(map(comm.nbytes, xs))} if sequence[r] else {})
            assert gone.calls == {("all_to_all", "a"): 1}
            ys[0].mul_(2)  # what came may be written to, and the tensors beside it stay
            assert torch.equal(ys[1], _part(wholes[1], each[1], 1, r))


def _case_gather_and_scatter(axis: Axis) -> None:
    """all_gather and reduce_scatter along every dim, with every cut; each is the gradient of the other, summed over ranks."""
    n, r = axis.size, axis.rank
    whole = _noise(5, 8, 7, seed=3)
    weights = [_noise(5, 8, 7, seed=10 + rank) for rank in range(n)]
    total = torch.stack(weights).sum(0)
    for dim in range(3):
        rest = whole.numel() // whole.shape[dim] * 8
        for sizes in _cuts(whole.shape[dim], n):
            x = _part(whole, sizes, dim, r).requires_grad_()
            others = rest * (whole.shape[dim] - sizes[r])
            with comm.ledger(axis) as counted:
                y = comm.all_gather(x, axis, dim, sizes)
                assert torch.equal(y, whole) and y.is_contiguous()
                torch.testing.assert_close(_grad(y, x, weights[r]), _part(total, sizes, dim, r))
            assert counted.bytes == {("all_gather", "a"): (n - 1) * rest * sizes[r], ("reduce_scatter", "a"): others}
            x = weights[r].clone().requires_grad_()
            with comm.ledger(axis) as counted:
                y = comm.reduce_scatter(x, axis, dim, sizes)
                torch.testing.assert_close(y, _part(total, sizes, dim, r))
                assert torch.equal(_grad(y, x, _part(whole, sizes, dim, r)), whole)
            assert counted.bytes == {("all_gather", "a"): (n - 1) * rest * sizes[r], ("reduce_scatter", "a"): others}


def _case_dtypes(axis: Axis) -> None:
    """Number types other than float32."""
    n, r = axis.size, axis.rank
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64):
        whole = (_noise(3, 2 * n, 3 * n, seed=4) * 9).to(dtype)
        rows, columns = even_sizes(2 * n, n), even_sizes(3 * n, n)
        x = _part(whole, rows, 1, r)
        assert torch.equal(comm.all_to_all(x, axis, 2, 1), _part(whole, columns, 2, r))
        assert torch.equal(comm.all_gather(x, axis, 1), whole)
        came = comm.pass_on([x], axis, r + 1, r - 1).wait()[0]
        assert torch.equal(came, _part(whole, rows, 1, (r - 1) % n))
        if dtype.is_floating_point:
            same = comm.reduce_scatter(whole, axis, 1)
            torch.testing.assert_close(same, x * n)


def _case_nothing_at_all(axis: Axis) -> None:
    """Tensors without a number, on all ranks."""
    empty = torch.zeros(2, 0, axis.size, requires_grad=True)
    for y in (
        comm.all_to_all(empty, axis, 2, 1),
        comm.all_gather(empty, axis, 1),
        comm.reduce_scatter(empty, axis, 1),
        comm.all_gather(empty, axis, 2),
    ):
        assert y.numel() == 0 and _grad(y, empty, torch.ones_like(y)).shape == empty.shape
    assert axis.ledger.total() == 0


def _case_round_trip(axis: Axis) -> None:
    """Exchange, a computation that is not linear, and exchange back: gradients of one process, and gradients of gradients."""
    n, r = axis.size, axis.rank
    sequence, hidden = even_sizes(2 * n + 1, n), even_sizes(n + 2, n)
    whole = _noise(2, 2 * n + 1, n + 2, seed=5).requires_grad_()
    truth = torch.softmax(whole, 1).square()
    (wanted,) = torch.autograd.grad(truth.sum(), whole, create_graph=True)
    (wanted_more,) = torch.autograd.grad(wanted.square().sum(), whole)
    x = _part(whole.detach(), sequence, 1, r).requires_grad_()
    inner = comm.all_to_all(x, axis, 2, 1, hidden, sequence, SBH)
    outer = comm.all_to_all(torch.softmax(inner, 1).square(), axis, 1, 2, sequence, hidden)
    torch.testing.assert_close(outer, _part(truth.detach(), sequence, 1, r))
    (grad,) = torch.autograd.grad(outer.sum(), x, create_graph=True)
    torch.testing.assert_close(grad, _part(wanted.detach(), sequence, 1, r))
    (more,) = torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(more, _part(wanted_more, sequence, 1, r))


def _case_in_place(axis: Axis) -> None:
    """What came may be written to, and the gradient knows."""
    x = torch.ones(2, axis.size, axis.size, requires_grad=True)
    for y in (
        comm.all_to_all(x, axis, 2, 1),
        comm.all_to_all(x, axis, 2, 1, order=SBH),
        comm.all_gather(x, axis, 0),
        comm.reduce_scatter(x, axis, 1),
    ):
        summed = y.detach().clone()
        y.mul_(3)
        assert torch.equal(y, 3 * summed)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert float(grad.min()) >= 3


def _case_strides_of_dims_of_one(axis: Axis) -> None:
    """Ranks with one row and ranks with several have different strides; what travels must not depend on them."""
    n, r = axis.size, axis.rank
    sequence = (1, *(3,) * (n - 1))
    whole = _noise(2, sum(sequence), n, seed=6)
    x = _laid(_part(whole, sequence, 1, r), SBH).contiguous().requires_grad_()
    y = comm.all_to_all(x, axis, 2, 1, None, sequence)
    weight = whole.split(1, 2)[r]
    assert torch.equal(_grad(y, x, weight), _part(whole, sequence, 1, r))


def _case_copies(axis: Axis) -> None:
    """What the ledger says of copies is what torch copies, in both layouts and both ways; the values are the same."""
    n, r = axis.size, axis.rank
    b, s, h = 2, 3, 4 * n
    whole = _noise(b, s * n, h, seed=7)
    part, columns = whole.split(s, 1)[r], whole.split(4, 2)[r]
    one = part.numel() * 8  # bytes
    own = one // n if axis.exchange == "point_to_point" else 0  # what stays here, which the collective copies itself
    # (input's order in memory, result's order, tensors) -> copies before and after
    wanted = {
        (BSH, BSH): (1, 1),
        (BSH, SBH): (1, 0),
        (SBH, SBH): (1, 0),
        (SBH, BSH): (1, 1),
        ((2, 0, 1), (2, 0, 1)): (0, 1),
    }
    for (into, order), (packs, unpacks) in wanted.items():
        x = _laid(part, into).requires_grad_()
        weight = _laid(columns, order)
        with comm.ledger(axis) as forward, Copied() as copied:
            y = comm.all_to_all(x, axis, 2, 1, order=order)
        assert torch.equal(y, columns)
        assert (forward.copies["all_to_all", "a", "pack"], forward.copies["all_to_all", "a", "unpack"]) == (
            packs,
            unpacks,
        )
        assert copied.bytes == (packs + unpacks) * one + own
        product = y * weight
        with comm.ledger(axis) as back, Copied() as copied:
            torch.autograd.grad(product, x, torch.ones_like(product))
        # what is copied before on the way there is copied after on the way back
        assert (back.copies["all_to_all", "a", "unpack"], back.copies["all_to_all", "a", "pack"]) == (packs, unpacks)
        assert copied.bytes == (packs + unpacks) * one + own
    # of a single video (B = 1) parts of the sequence lie one behind the other: one copy on one side
    x = part[:1].contiguous()
    with comm.ledger(axis) as forward, Copied() as copied:
        y = comm.all_to_all(x, axis, 2, 1)
        comm.all_to_all(y, axis, 1, 2)
    assert forward.copies == {("all_to_all", "a", "pack"): 1, ("all_to_all", "a", "unpack"): 1}
    assert copied.bytes == one // 2 * 2 + own // 2 * 2
    with comm.ledger(axis) as forward:
        comm.all_gather(x[0], axis, 0)
        comm.reduce_scatter(whole[0], axis, 0)
    assert not forward.copies


def _case_pass_on(axis: Axis) -> None:
    """A ring each way, several tensors of several shapes and types, two calls under way, strided and empty tensors."""
    n, r = axis.size, axis.rank
    before, after = (r - 1) % n, (r + 1) % n

    def of(rank: int) -> list[Tensor]:
        keys = _noise(2, 3 + rank, 4, seed=rank).transpose(0, 1)
        return [keys, torch.arange(rank * 2) % 3 == 0, keys.to(torch.bfloat16) * 2]

    shapes = [tensor.shape for tensor in of(before)]
    with comm.ledger(axis) as counted:
        first = comm.pass_on(of(r), axis, after, before, shapes)
        other_way = comm.pass_on([torch.full((2,), float(r))], axis, before, after, kind="ring_back")
        third = comm.pass_on([torch.full((2,), -float(r))], axis, after, before, name="inner")
        assert float(third.wait()[0][0]) == -before  # waited for out of turn
        assert float(other_way.wait()[0][0]) == after
        for _ in range(2):  # and asked twice
            for came, wanted in zip(first.wait(), of(before), strict=True):
                assert came.dtype == wanted.dtype and torch.equal(came, wanted) and came.is_contiguous()
    sent = sum(map(comm.nbytes, of(r)))
    assert counted.bytes == {("ring", "a"): sent, ("ring_back", "a"): 8, ("ring", "inner"): 8}
    assert counted.copies == {("ring", "a", "pack"): 2}
    for hops in range(1, n):  # all the way round
        came = comm.pass_on([torch.tensor([r])], axis, r + hops, r - hops).wait()[0]
        assert int(came) == (r - hops) % n
    x = torch.ones(2, requires_grad=True)
    assert comm.pass_on([x], axis, r, r).wait()[0].requires_grad is False
    with comm.ledger(axis) as counted:
        comm.pass_on([x], axis, r + n, r - n).wait()
    assert not counted.calls
    with pytest.raises(ValueError, match="cannot send to"):
        comm.pass_on([x], axis, r, after)
    with pytest.raises(ValueError, match="shapes come"):
        comm.pass_on([x], axis, after, before, [])


def _case_pass_on_while_exchanging(axis: Axis) -> None:
    """A hop under way is not mixed up with exchanges between the same ranks."""
    n, r = axis.size, axis.rank
    hop = comm.pass_on([torch.full((3,), r)], axis, r + 1, r - 1)
    y = comm.all_to_all(torch.arange(n)[:, None] + 10 * r, axis, 0, 1)
    gathered = comm.all_gather(torch.tensor([r]), axis, 0, (1,) * n)
    assert y.tolist() == [[r + 10 * source for source in range(n)]] and gathered.tolist() == list(range(n))
    assert hop.wait()[0].tolist() == [(r - 1) % n] * 3


def _routed(axis: Axis, seed: int) -> list[list[int]]:
    """Rows from each rank to each: uneven, some none, and rank 1 sends none at all."""
    counts = torch.randint(0, 4, (axis.size, axis.size), generator=torch.Generator().manual_seed(seed))
    counts[1] = 0
    counts[0, axis.size - 1] = 0
    return counts.tolist()


def _case_halves(axis: Axis) -> None:
    """Two exchanges under way, with work between: the bits, gradients, bytes and copies of whole exchanges."""
    n, r = axis.size, axis.rank
    sequence, hidden = even_sizes(2 * n + 1, n), even_sizes(n + 2, n)
    x = _part(_noise(2, 2 * n + 1, n + 2, seed=5), sequence, 1, r).requires_grad_()

    def whole() -> Tensor:
        y, z = comm.all_to_all(x, axis, 2, 1, hidden, sequence, SBH), comm.all_gather(x.sin(), axis, 1, sequence)
        beside = torch.tanh(x).sum()
        return beside * comm.reduce_scatter(z, axis, 1, sequence).sum() + (y * y).sum()

    def halves() -> Tensor:
        y = comm.start_all_to_all(x, axis, 2, 1, hidden, sequence, SBH)
        z = comm.start_all_gather(x.sin(), axis, 1, sequence)
        beside = torch.tanh(x).sum()
        (came,) = finish_all(y)
        summed = comm.start_reduce_scatter(finish(z), axis, 1, sequence)
        return beside * finish(summed).sum() + (came * came).sum()

    results = []
    for run in (whole, halves):
        with comm.ledger(axis) as counted:
            y = run()
            results.append((y.detach(), *torch.autograd.grad(y, x), counted.bytes, counted.calls, counted.copies))
    assert results[0][2:] == results[1][2:] and torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])  # parts of a gradient may be added up in another order


def _case_rows_of_run_time(axis: Axis) -> None:
    """Rows go where a routing decision says, with gradients, also to and from ranks that have none."""
    n, r = axis.size, axis.rank
    routed = _routed(axis, 8)
    sent = [_noise(sum(routed[rank]), 2, 3, seed=20 + rank) for rank in range(n)]
    with comm.ledger(axis) as counted:
        counts, _ = comm.row_counts(torch.tensor(routed[r]), axis)
    assert counts == RowCounts(tuple(routed[r]), tuple(row[r] for row in routed))
    assert counted.bytes == {("counts", "a"): 8 * (n - 1)} and counted.calls == {("counts", "a"): 1}
    x = sent[r].clone().requires_grad_()
    with comm.ledger(axis) as counted:
        y = finish(comm.start_rows(x, axis, counts))
        assert torch.equal(y, torch.cat([sent[rank].split(routed[rank])[r] for rank in range(n)]))
        home = finish(comm.start_rows(y * y, axis, counts.back()))
        assert torch.equal(home, sent[r].square())
        (grad,) = torch.autograd.grad((home * sent[r]).sum(), x, create_graph=True)
        assert torch.equal(grad, 2 * sent[r].square())
        torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], 2 * sent[r])
    row, forward, back = 8 * 2 * 3, sum(counts.sends) - counts.sends[r], sum(counts.comes) - counts.comes[r]
    # there, home, and both gradients; the gradient of the gradient goes all four ways again, less the last home
    assert counted.calls["rows", "a"] >= 4 and counted.bytes["rows", "a"] >= 2 * row * (forward + back)


def _case_one_order(axis: Axis) -> None:
    """All ranks issue the same messages in the same order, forward and backward, also one that has nothing to send."""
    r, routed = axis.rank, _routed(axis, 9)
    issued: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(messages, name)

        def issue(*args: Any, **kwargs: Any) -> Any:
            issued.append(name)
            return real(*args, **kwargs)

        return mock.patch.object(messages, name, issue)

    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with noted("_swap"), noted("_ALL_GATHER"), noted("_REDUCE_SCATTER"), noted("between"):
        x = _noise(sum(routed[r]), 3, seed=r).requires_grad_()
        for _ in range(2):
            counts, _ = comm.row_counts(torch.tensor(routed[r]), axis)
            pending = comm.start_rows(x * weight, axis, counts)
            gathered = comm.start_all_gather(weight.sin(), axis, 0)
            beside = torch.tanh(x).sum()
            y = finish(pending).exp()
            x = finish(comm.start_rows(y, axis, counts.back())) * finish(gathered).sum() + beside
        count = len(issued)
        x.square().sum().backward()
    everyone = comm.all_gather_objects(issued)
    assert all(of_rank == issued for of_rank in everyone)
    assert len(issued) - count >= 6 and weight.grad is not None
    if r == 1:
        assert x.numel() == 0 and not weight.grad.isnan().any()


def _case_links(axis: Axis) -> None:
    """Bytes by link, by a map of ranks to nodes: ranks 0 and 1 on one node, the others on one each."""
    n, r = axis.size, axis.rank
    nodes = [0, 0, *range(1, n - 1)]
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("a",))
    one = Axis.of(mesh, "a", exchange=axis.exchange, nodes=nodes)
    assert one.nodes == tuple(nodes) and Axis.of(mesh, "a").nodes == (0,) * n
    routed = _routed(axis, 10)
    x = torch.zeros(sum(routed[r]), 2)
    comm.swap_rows(x, one, comm.RowCounts(tuple(routed[r]), tuple(row[r] for row in routed)))
    near = sum(routed[r][place] for place in range(n) if place != r and nodes[place] == nodes[r])
    far = sum(routed[r][place] for place in range(n) if nodes[place] != nodes[r])
    assert one.ledger.by_link["rows", "a", "inner"] == 8 * near and one.ledger.by_link["rows", "a", "outer"] == 8 * far
    comm.pass_on([x.new_zeros(3)], one, r + 1, r - 1).wait()
    crosses = nodes[(r + 1) % n] != nodes[r]
    assert one.ledger.by_link["ring", "a", "outer" if crosses else "inner"] == 12
    assert one.ledger.bytes == {("rows", "a"): 8 * (near + far), ("ring", "a"): 12}
    with pytest.raises(ValueError, match="a map of 1 ranks"):
        Axis.of(mesh, "a", nodes=[0])
    if n == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        outer, inner = (Axis.of(square, name, nodes=nodes) for name in ("outer", "inner"))
        assert inner.nodes == ((0, 0) if r < 2 else (1, 2)) and outer.nodes == ((0, 1) if r % 2 == 0 else (0, 2))
        assert flattened("both", outer, inner, mesh=square, nodes=nodes).nodes == tuple(nodes)


CASES: tuple[Callable[[Axis], None], ...] = (
    _case_all_to_all,
    _case_rows,
    _case_gather_and_scatter,
    _case_dtypes,
    _case_nothing_at_all,
    _case_round_trip,
    _case_in_place,
    _case_strides_of_dims_of_one,
    _case_copies,
    _case_pass_on,
    _case_pass_on_while_exchanging,
    _case_halves,
    _case_rows_of_run_time,
    _case_one_order,
    _case_links,
)


def _run() -> dict[str, str]:
    """The tracebacks of failures, by case and way."""
    problems = {}
    for case, way in itertools.product(CASES, WAYS):
        try:
            case(Axis("a", dist.group.WORLD, dist.get_world_size(), dist.get_rank(), exchange=way))
        except Exception:
            problems[f"{case.__name__} {way}"] = traceback.format_exc()
    return problems


@pytest.fixture(scope="module", params=slow_but(WORLDS, WORLDS[1:]))
def problems(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """All cases of a world, run in one go."""
    return run_ranks(_run, request.param, timeout=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("_case_"))
def test_exchange(case: Callable[[Axis], None], problems: list[dict[str, str]]) -> None:
    for rank, problem in enumerate(problems):
        for way in WAYS:
            assert f"{case.__name__} {way}" not in problem, f"rank {rank}:\n{problem[f'{case.__name__} {way}']}"
