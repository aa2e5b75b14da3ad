"""Exchanges of tensors over an axis of the mesh, which gradients go back through. Every call is counted (`Axis.ledger`).

Rank r of n holds `sizes[r]` of a dim that is shared out; sizes may be uneven and zero. What travels is one flat buffer: first all that
rank 0 is to get, then rank 1's, and so on, each part in the order of the dims that the receiver asked for. So a transpose (B, S, H) <->
(S, B, H) before or after an exchange rides on the copy into the buffer or out of it, of which there is one at most on each side and
none where the parts already lie so. Which order travels depends on arguments that all ranks share and never on a rank's own strides,
which may differ where a dim has size 0 or 1.

What came is offered to whoever recomputes (`mmspeed.replay.kept`), so that a second pass need not exchange again. An exchange of
gradients, or one that is made while no gradient is recorded, is not: it may be made in the first pass alone.

All ranks of the axis make the same calls in the same order, those with empty parts too, forward and backward: a loss must depend on
the result on every rank or on none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed.graphs import outside_graphs
from mmspeed.replay import offered

from .axis import Axis, nbytes
from .packing import Sizes, even_sizes, laid_out, landing, layout, lengths_of, pack, unpack

# newer torch has these under other names, and warns of the old ones
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(
    x: Tensor,
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    """From whole along `scatter_dim` and shared along `gather_dim` to the other way round.

    Args:
        x: this rank's part.
        scatter_sizes: what each rank gets of `scatter_dim`; None: even sizes.
        gather_sizes: what each rank holds of `gather_dim`; None: as much as this rank.
        order: the result's dims from the outermost in memory to the innermost; `result.permute(order)` is contiguous. None: as
            they stand. The result's shape does not depend on it.

    Raises ValueError for dims and sizes that do not fit `x`.
    """
    each = None if scatter_sizes is None else [scatter_sizes]
    return all_to_all_many([x], axis, scatter_dim, gather_dim, each, gather_sizes, order)[0]


def all_to_all_many(
    xs: Sequence[Tensor],
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes_each: Sequence[Sequence[int] | None] | None = None,
    gather_sizes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> list[Tensor]:
    """`all_to_all` of several tensors in one message, such as queries, keys and values with different numbers of heads.

    All have the same number of dims, number type and size of `gather_dim`; `scatter_sizes_each` has the sizes of each tensor.
    """
    if not xs:
        return []
    if len({(x.dim(), x.dtype, x.device) for x in xs}) > 1:
        raise ValueError("tensors of one exchange have the same number of dims, number type and device")
    dims = xs[0].dim()
    scatter_dim, gather_dim = _dim(scatter_dim, dims), _dim(gather_dim, dims)
    if scatter_dim == gather_dim:
        raise ValueError("an all-to-all scatters along one dim and gathers along another")
    sizes_each = scatter_sizes_each if scatter_sizes_each is not None else [None] * len(xs)
    if len(sizes_each) != len(xs):
        raise ValueError(f"scatter sizes of {len(sizes_each)} tensors, but {len(xs)} tensors")
    scatter = tuple(
        _whole(even_sizes(x.shape[scatter_dim], axis.size) if sizes is None else sizes, x, scatter_dim, axis)
        for x, sizes in zip(xs, sizes_each, strict=True)
    )
    gather = tuple(_shared(gather_sizes, x, gather_dim, axis) for x in xs)
    wire = _order(order, dims)
    if axis.size == 1:
        return [laid_out(x, wire) for x in xs] if order is not None else list(xs)
    return _exchange(axis, scatter_dim, gather_dim, scatter, gather, wire, xs)


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The parts of all ranks, joined along `dim`. Backward: `reduce_scatter`, so gradients of all ranks are added up.

    `sizes`: what each rank holds of `dim`; None: as much as this rank. Raises ValueError for sizes that do not fit.
    """
    dim = _dim(dim, x.dim())
    parts = _shared(sizes, x, dim, axis)
    if axis.size == 1:
        return x
    return _apply(_AllGather, x, axis, dim, parts)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`. Backward: `all_gather`.

    `sizes`: what each rank gets of `dim`; None: even sizes. Uneven ones, and `point_to_point`, are made from parts: an all-to-all and
    a local sum. Raises ValueError for sizes that do not fit, and for truth values.
    """
    dim = _dim(dim, x.dim())
    if x.dtype == torch.bool:
        raise ValueError("truth values cannot be added up: make numbers of them")
    parts = _whole(even_sizes(x.shape[dim], axis.size) if sizes is None else sizes, x, dim, axis)
    if axis.size == 1:
        return x
    return _apply(_ReduceScatter, x, axis, dim, parts)


@outside_graphs
def swap_rows(x_ZE: Tensor, axis: Axis, sends: Sequence[int], comes: Sequence[int], kind: str = "rows") -> Tensor:
    """Give each rank some rows, another number to each, and get `comes[r]` from rank r, rank by rank; no gradients.

    Args:
        x_ZE: rows (of any shape) for rank 0 first, `sends[0]` of them, then those for rank 1. Ranks may be given none.
        kind: what the ledger counts the bytes as.

    Raises ValueError for numbers of rows that do not fit.
    """
    if (
        len(sends) != axis.size
        or len(comes) != axis.size
        or sum(sends) != len(x_ZE)
        or sends[axis.rank] != comes[axis.rank]
    ):
        raise ValueError(
            f"{axis.name}: {len(x_ZE)} rows on rank {axis.rank}, not {tuple(sends)} to go and {tuple(comes)} to come"
        )
    if axis.size == 1:
        return x_ZE
    width, received = math.prod(x_ZE.shape[1:]), x_ZE.new_empty((sum(comes), *x_ZE.shape[1:]))
    _swap(x_ZE.contiguous().view(-1), received.view(-1), [n * width for n in sends], [n * width for n in comes], axis)
    axis.count(kind, (sum(sends) - sends[axis.rank]) * width * x_ZE.element_size(), int(not x_ZE.is_contiguous()))
    return received


class Pending:
    """Tensors on their way. Holds what is sent until it is waited for."""

    def __init__(self, received: list[Tensor], works: list[Any], sent: list[Tensor]) -> None:
        self._received, self._works, self._sent = received, works, sent

    @outside_graphs
    def wait(self) -> list[Tensor]:
        """What came, once it is here; on an accelerator the current queue of work waits, not the caller. May be asked again."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received


@outside_graphs
def pass_on(
    tensors: Sequence[Tensor],
    axis: Axis,
    to: int,
    source: int,
    shapes: Sequence[Sequence[int]] | None = None,
    kind: str = "ring",
    name: str | None = None,
) -> Pending:
    """Begin to send tensors to place `to` of the axis and to receive as many from place `source`; no gradients.

    Every rank of the axis makes the call, and the places form rings: who sends to a place is the source of that place. Several calls may be
    under way; those between two ranks arrive in the order in which they were made. Until `wait`, tensors that are sent must not change.

    Args:
        shapes: what comes, in the number types of `tensors`; None: shapes as sent.
        kind, name: what the ledger counts the bytes as; None: the axis's name.

    Raises ValueError when only one of `to` and `source` is this rank, or for another number of shapes.
    """
    expected = [tensor.shape for tensor in tensors] if shapes is None else [torch.Size(shape) for shape in shapes]
    if len(expected) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors are sent, but {len(expected)} shapes come")
    to, source = to % axis.size, source % axis.size
    if (to == axis.rank) != (source == axis.rank):
        raise ValueError(f"rank {axis.rank} of {axis.name} cannot send to {to} and receive from {source}")
    if to == axis.rank:
        return Pending([tensor.detach() for tensor in tensors], [], [])
    sent = [tensor.detach().contiguous() for tensor in tensors]
    packs = sum(not tensor.is_contiguous() for tensor in tensors)
    received = [tensor.new_empty(shape) for tensor, shape in zip(sent, expected, strict=True)]
    axis.count(kind, sum(map(nbytes, sent)), packs, 0, name)
    return Pending(received, _between([(to, tensor) for tensor in sent], [(source, t) for t in received], axis), sent)


@outside_graphs
def _exchange(
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter: tuple[Sizes, ...],
    gather: tuple[Sizes, ...],
    wire: Sizes,
    xs: Sequence[Tensor],
) -> list[Tensor]:
    plan = _Plan(axis, scatter_dim, gather_dim, scatter, gather, wire)
    return list(_AllToAll.apply(plan, (wire,) * len(xs), torch.is_grad_enabled(), *xs))


@outside_graphs
def _apply(function: type[torch.autograd.Function], x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Tensor:
    result: Tensor = function.apply(x, axis, dim, sizes, torch.is_grad_enabled())
    return result


@dataclass(frozen=True)
class _Plan:
    """An all-to-all of k tensors, in words that all ranks share. `wire` is the order of the dims on the way."""

    axis: Axis
    scatter_dim: int
    gather_dim: int
    scatter: tuple[Sizes, ...]  # (k) of (n)
    gather: tuple[Sizes, ...]  # (k) of (n)
    wire: Sizes

    def back(self) -> _Plan:
        """The way of the gradients: what is copied on one side here is copied on the other side there."""
        return _Plan(self.axis, self.gather_dim, self.scatter_dim, self.gather, self.scatter, self.wire)


class _AllToAll(torch.autograd.Function):
    """`layouts`: the order of each result's dims in memory; this rank's own affair, unlike the plan. `offers`: see the head of the file."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, layouts: tuple[Sizes, ...], offers: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.layouts = plan, tuple(layout(x) for x in xs)
        return offered(offers, "exchange", lambda: _all_to_all(plan, layouts, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_AllToAll.apply(ctx.plan.back(), ctx.layouts, False, *grads)


def _all_to_all(plan: _Plan, layouts: tuple[Sizes, ...], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    axis, sent = plan.axis, pack(xs, plan.scatter_dim, plan.scatter, plan.wire)
    shapes = []
    for x, scatter, gather in zip(xs, plan.scatter, plan.gather, strict=True):
        shape = list(x.shape)
        shape[plan.scatter_dim], shape[plan.gather_dim] = scatter[axis.rank], sum(gather)
        shapes.append(shape)
    comes = lengths_of(shapes, plan.gather_dim, plan.gather)
    results, flat, unpacks = landing(sent.flat, shapes, plan.gather_dim, plan.wire, layouts)
    _swap(sent.flat, flat, sent.lengths, comes, axis)
    if unpacks:
        unpack(flat, results, plan.gather_dim, plan.gather, plan.wire)
    axis.count("all_to_all", sent.bytes_to_others(axis.rank), sent.copies, unpacks)
    return tuple(results)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sizes, offers: bool) -> Tensor:
        ctx.back = axis, dim, sizes
        return offered(offers, "exchange", lambda: (_gather(x, axis, dim, sizes),))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceScatter.apply(grads[0], *ctx.back, False), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sizes, offers: bool) -> Tensor:
        ctx.back = axis, dim, sizes
        return offered(offers, "exchange", lambda: (_sum_and_scatter(x, axis, dim, sizes),))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllGather.apply(grads[0], *ctx.back, False), None, None, None, None


def _gather(x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Tensor:
    mine, wire = x.contiguous().view(-1), tuple(range(x.dim()))
    shape = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    results, flat, unpacks = landing(x, [shape], dim, wire, [wire])
    if axis.exchange == "collective" and len(set(sizes)) == 1:
        _ALL_GATHER(flat, mine, group=axis.group)
    else:
        parts = flat.split(lengths_of([shape], dim, [sizes]))
        parts[axis.rank].copy_(mine)
        others = [place for place in range(axis.size) if place != axis.rank]
        _finish(_between([(place, mine) for place in others], [(place, parts[place]) for place in others], axis))
    if unpacks:
        unpack(flat, results, dim, [sizes], wire)
    axis.count("all_gather", (axis.size - 1) * nbytes(mine), int(not x.is_contiguous()), unpacks)
    return results[0]


def _sum_and_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Tensor:
    sent = pack([x], dim, [sizes], tuple(range(x.dim())))
    shape = [*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :]]
    if axis.exchange == "collective" and len(set(sizes)) == 1:
        result = x.new_empty(shape)
        _REDUCE_SCATTER(result.view(-1), sent.flat, group=axis.group)
    else:
        parts = x.new_empty([axis.size, *shape])
        _swap(sent.flat, parts.view(-1), sent.lengths, [parts.numel() // axis.size] * axis.size, axis)
        result = parts.sum(0, dtype=x.dtype)
    axis.count("reduce_scatter", sent.bytes_to_others(axis.rank), sent.copies, 0)
    return result


def _swap(flat: Tensor, received: Tensor, sends: list[int], comes: list[int], axis: Axis) -> None:
    """Give each rank its part of the flat buffer, and receive from each, rank by rank."""
    if axis.exchange == "collective":
        dist.all_to_all_single(received, flat, comes, sends, group=axis.group)
        return
    to, source = flat.split(sends), received.split(comes)
    others = [place for place in range(axis.size) if place != axis.rank]
    works = _between([(place, to[place]) for place in others], [(place, source[place]) for place in others], axis)
    source[axis.rank].copy_(to[axis.rank])
    _finish(works)


def _between(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], axis: Axis) -> list[Any]:
    """Begin to send to, and to receive from, places of the axis. Empty tensors travel too, so that no rank stays away."""
    ops = [dist.P2POp(dist.isend, tensor, axis.peer(place), axis.group) for place, tensor in sends]
    ops += [dist.P2POp(dist.irecv, tensor, axis.peer(place), axis.group) for place, tensor in receives]
    return list(dist.batch_isend_irecv(ops)) if ops else []


def _finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _order(order: Sequence[int] | None, dims: int) -> Sizes:
    chosen = tuple(range(dims)) if order is None else tuple(_dim(dim, dims) for dim in order)
    if sorted(chosen) != list(range(dims)):
        raise ValueError(f"order {order} does not name each of {dims} dims once")
    return chosen


def _dim(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"there is no dim {dim} in a tensor of {dims} dims")
    return dim % dims


def _whole(sizes: Sequence[int], x: Tensor, dim: int, axis: Axis) -> Sizes:
    """Sizes of all ranks' parts of a dim that is whole here."""
    if len(sizes) != axis.size or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"{axis.name}: sizes {tuple(sizes)} do not cut dim {dim} of {tuple(x.shape)} for {axis.size} ranks"
        )
    return tuple(sizes)


def _shared(sizes: Sequence[int] | None, x: Tensor, dim: int, axis: Axis) -> Sizes:
    """Sizes of all ranks' parts of a dim of which this rank has one."""
    chosen = (x.shape[dim],) * axis.size if sizes is None else tuple(sizes)
    if len(chosen) != axis.size or min(chosen) < 0 or chosen[axis.rank] != x.shape[dim]:
        raise ValueError(
            f"{axis.name}: sizes {chosen} are not those of {axis.size} ranks of which rank {axis.rank} has dim {dim} of {tuple(x.shape)}"
        )
    return chosen
