"""Differentiable exchanges of tensors over an axis of the mesh. Every call is counted (`Axis.ledger`).

Along a dim that is split, rank r holds `sizes[r]`; sizes may be uneven and zero. A message is one flat buffer: the part for rank 0, then
that for rank 1, and so on, each already in the memory order that the receiver asked for. So a transpose (B, S, H) <-> (S, B, H) before or
after an exchange is fused into the copy into or out of the buffer; there is at most one copy on each side, and none where parts have the
right order already. The number of messages and the order within them follow from arguments that are the same on all ranks, never from a
rank's own strides, which may differ where a dim has size 0 or 1.

Each exchange is a start and a finish (`halves`). `start_all_to_all` and the like run the first half alone, so that work issued before
`finish` overlaps with the communication. The same rules hold for both: results are offered for recomputation, and all ranks of the axis
make the same calls in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.graphs import outside_graphs
from mmspeed.replay import record_or_replay

from .axis import Axis, nbytes
from .halves import PendingExchange, finish, start
from .messages import AllGather, AllToAll, ReduceScatter, RowMove, between
from .packing import Sizes, even_sizes, laid_out


def all_to_all(
    x: Tensor,
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    *,
    wire: Sequence[int] | None = None,
    grad_order: Sequence[int] | None = None,
) -> Tensor:
    """Split a tensor along `scatter_dim` over the ranks and concatenate the parts that come along `gather_dim`, as in Ulysses.

    Args:
        x: this rank's part: whole along `scatter_dim`, split along `gather_dim`.
        scatter_sizes: the size of `scatter_dim` that each rank receives; None: even sizes.
        gather_sizes: the size of `gather_dim` that each rank holds; None: all hold as much as this rank.
        order: the memory order of the result's dims, outermost first; `result.permute(order)` is contiguous. None: that of the shape. It
            does not change the result's shape.
        wire: the order of the dims in the message, the same on all ranks; None: `order`.
        grad_order: the memory order of the gradient's dims; None: that of `x`.

    Raises ValueError for dims and sizes that do not fit `x`.
    """
    sizes = (scatter_sizes, gather_sizes, order)
    return finish(start_all_to_all(x, axis, scatter_dim, gather_dim, *sizes, wire=wire, grad_order=grad_order))


def start_all_to_all(
    x: Tensor,
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    *,
    wire: Sequence[int] | None = None,
    grad_order: Sequence[int] | None = None,
) -> PendingExchange:
    """The first half of `all_to_all`; `finish` is the second."""
    each = None if scatter_sizes is None else [scatter_sizes]
    return start_all_to_all_many(
        [x], axis, scatter_dim, gather_dim, each, gather_sizes, order, wire=wire, grad_order=grad_order
    )


def start_all_to_all_many(
    xs: Sequence[Tensor],
    axis: Axis,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes_each: Sequence[Sequence[int] | None] | None = None,
    gather_sizes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    *,
    wire: Sequence[int] | None = None,
    grad_order: Sequence[int] | None = None,
    apart: bool = False,
) -> PendingExchange:
    """The first half of `all_to_all` of several tensors at once, such as queries, keys and values; `finish_all` is the second.

    All have the same number of dims, dtype, device and size of `gather_dim`; `scatter_sizes_each` has the scatter sizes of each tensor.
    They share one message, or have one each where that saves a copy (`messages.AllToAll`). Where `gather_dim` is outermost on the wire and
    the results have its order, they stay side by side in the receive buffer: `result.permute(order)` has contiguous rows, with the rows of
    the other tensors in between. `apart`: one message for each tensor, so that each result is contiguous.
    Raises ValueError for tensors, dims and sizes that do not fit together.
    """
    if len({(x.dim(), x.dtype, x.device) for x in xs}) != 1:
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
    into, back = _order(order, dims), None if grad_order is None else _order(grad_order, dims)
    if axis.size == 1:
        return PendingExchange([laid_out(x, into) for x in xs] if order is not None else xs)
    move = AllToAll(axis, scatter_dim, gather_dim, scatter, gather, into if wire is None else _order(wire, dims), apart)
    return start(move, (into,) * len(xs), xs, None if back is None else (back,) * len(xs))


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the parts of all ranks along `dim`. Backward is a `reduce_scatter`, so gradients of all ranks are summed.

    `sizes`: the size of `dim` that each rank holds; None: all hold as much as this rank. Raises ValueError for sizes that do not fit.
    """
    return finish(start_all_gather(x, axis, dim, sizes))


def start_all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> PendingExchange:
    """The first half of `all_gather`; `finish` is the second."""
    dim = _dim(dim, x.dim())
    parts = _shared(sizes, x, dim, axis)
    return PendingExchange([x]) if axis.size == 1 else start(AllGather(axis, dim, parts), [_natural(x)], [x])


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Sum `x` over all ranks and return this rank's part of it along `dim`. Backward is an `all_gather`.

    `sizes`: the size of `dim` that each rank receives; None: even sizes. Uneven sizes, and `point_to_point`, use an all-to-all and a local
    sum. Raises ValueError for sizes that do not fit, and for booleans.
    """
    return finish(start_reduce_scatter(x, axis, dim, sizes))


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> PendingExchange:
    """The first half of `reduce_scatter`; `finish` is the second."""
    dim = _dim(dim, x.dim())
    if x.dtype == torch.bool:
        raise ValueError("booleans cannot be summed: convert them to numbers")
    parts = _whole(even_sizes(x.shape[dim], axis.size) if sizes is None else sizes, x, dim, axis)
    return PendingExchange([x]) if axis.size == 1 else start(ReduceScatter(axis, dim, parts), [_natural(x)], [x])


@dataclass(frozen=True)
class RowCounts:
    """The number of rows that this rank sends to each rank of an axis, and of those that come from each; any may be 0.

    Where another axis was asked for: `beside`: the number that comes to each of its ranks; `kinds`: of each kind to all of them.
    """

    sends: tuple[int, ...]
    comes: tuple[int, ...]
    beside: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def back(self) -> RowCounts:
        """The counts for sending the same rows back."""
        return RowCounts(self.comes, self.sends)


@outside_graphs
def row_counts(sends_PL: Tensor, axis: Axis, beside: Axis | None = None) -> tuple[RowCounts, Tensor]:
    """Tell every rank how many rows of each kind this rank will send to it, where that is known at run time only.

    `sends_PL`: whole numbers, (ranks,) or (ranks, L) for L kinds of rows, such as experts; 8 bytes of each go out. The host must know the
    sizes of messages, so this waits for the device, once: call it before, not between, the halves of another exchange. A recomputation
    (`mmspeed.replay`) gets the counts of the first pass.

    Returns the rows by rank, on the host, and the counts that come, on the device, in the shape of `sends_PL`; with `beside`, those that
    come to each of its ranks, one behind the other.
    Raises ValueError for counts of another shape or of floats.
    """
    if sends_PL.dim() not in (1, 2) or len(sends_PL) != axis.size or sends_PL.is_floating_point():
        raise ValueError(
            f"{axis.name}: counts for {axis.size} ranks are whole numbers of shape ({axis.size},), or of kinds by rank"
        )

    def exchanged() -> tuple[RowCounts, Tensor]:
        ones = (1,) * axis.size
        with torch.no_grad():
            counts = sends_PL.detach().long()
            come = swap_rows(counts, axis, RowCounts(ones, ones), "counts")
            sums = [each.view(axis.size, -1).sum(1) for each in (counts, come)]
            if beside is not None:
                come = all_gather(come[None], beside, 0)
                sums += [come.flatten(1).sum(1), come.sum((0, 1))]
        return RowCounts(*on_host(sums)), come

    return record_or_replay(exchanged)[0]


def on_host(counts: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Whole numbers of several vectors, by one read."""
    numbers = torch.cat(list(counts)).tolist()
    ends = list(itertools.accumulate(map(len, counts)))
    return [tuple(numbers[end - len(each) : end]) for each, end in zip(counts, ends, strict=True)]


def start_rows(x_ZE: Tensor, axis: Axis, counts: RowCounts, kind: str = "rows") -> PendingExchange:
    """The first half of `swap_rows`; `finish` is the second."""
    sends, comes = counts.sends, counts.comes
    if (
        len(sends) != axis.size
        or len(comes) != axis.size
        or min(*sends, *comes) < 0
        or sum(sends) != len(x_ZE)
        or sends[axis.rank] != comes[axis.rank]
    ):
        raise ValueError(f"{axis.name}: {len(x_ZE)} rows on rank {axis.rank}, not {sends} to go and {comes} to come")
    if axis.size == 1:
        return PendingExchange([x_ZE])
    return start(RowMove(axis, sends, comes, kind), [_natural(x_ZE)], [x_ZE])


def swap_rows(x_ZE: Tensor, axis: Axis, counts: RowCounts, kind: str = "rows") -> Tensor:
    """Send `counts.sends[r]` rows to each rank r and receive `counts.comes[r]` from it: an uneven all-to-all. Backward: the reverse.

    Args:
        x_ZE: rows (of any shape) for rank 0 first, `counts.sends[0]` of them, then those for rank 1. A rank may get none.
        counts: from the host, or from `row_counts`.
        kind: the ledger's name for the bytes.

    Raises ValueError for numbers of rows that do not fit.
    """
    return finish(start_rows(x_ZE, axis, counts, kind))


class PendingTensors:
    """Tensors in transit, started by `pass_on`. Holds the tensors that are sent until `wait`."""

    def __init__(self, received: list[Tensor], axis: Axis, works: list[Any], sent: list[Tensor]) -> None:
        self._received, self._axis, self._works, self._sent = received, axis, works, sent

    @outside_graphs
    def wait(self) -> list[Tensor]:
        """Wait for the received tensors (`Axis.wait`) and return them. May be called again."""
        self._axis.wait(self._works)
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
) -> PendingTensors:
    """Start sending tensors to place `to` of the axis and receiving as many from place `source`; no gradients flow through it.

    Every rank of the axis makes the call, and the places form rings: the rank that sends to a place is that place's source. Several calls
    may be in flight; messages between two ranks arrive in the order of the calls. Do not change the sent tensors before `wait`.

    Args:
        shapes: the shapes to receive, in the dtypes of `tensors`; None: the same as sent.
        kind, name: the ledger's names for the bytes and the axis; None: the axis's name.

    Raises ValueError when only one of `to` and `source` is this rank, or for another number of shapes.
    """
    expected = [tensor.shape for tensor in tensors] if shapes is None else [torch.Size(shape) for shape in shapes]
    if len(expected) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors are sent, but {len(expected)} shapes come")
    to, source = to % axis.size, source % axis.size
    if (to == axis.rank) != (source == axis.rank):
        raise ValueError(f"rank {axis.rank} of {axis.name} cannot send to {to} and receive from {source}")
    if to == axis.rank:
        return PendingTensors([tensor.detach() for tensor in tensors], axis, [], [])
    sent = [tensor.detach().contiguous() for tensor in tensors]
    packs = sum(not tensor.is_contiguous() for tensor in tensors)
    received = [tensor.new_empty(shape) for tensor, shape in zip(sent, expected, strict=True)]
    bytes_to = [sum(map(nbytes, sent)) if place == to else 0 for place in range(axis.size)]
    packed = sum(nbytes(tensor) for tensor in tensors if not tensor.is_contiguous())
    axis.count(kind, bytes_to, packs, 0, name, packed=packed)
    return PendingTensors(
        received, axis, between([(to, tensor) for tensor in sent], [(source, t) for t in received], axis), sent
    )


def _order(order: Sequence[int] | None, dims: int) -> Sizes:
    chosen = tuple(range(dims)) if order is None else tuple(_dim(dim, dims) for dim in order)
    if sorted(chosen) != list(range(dims)):
        raise ValueError(f"order {order} does not name each of {dims} dims once")
    return chosen


def _natural(x: Tensor) -> Sizes:
    return tuple(range(x.dim()))


def _dim(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"there is no dim {dim} in a tensor of {dims} dims")
    return dim % dims


def _whole(sizes: Sequence[int], x: Tensor, dim: int, axis: Axis) -> Sizes:
    """Check and return the sizes of all ranks' parts of a dim that is whole on this rank."""
    if len(sizes) != axis.size or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"{axis.name}: sizes {tuple(sizes)} do not cut dim {dim} of {tuple(x.shape)} for {axis.size} ranks"
        )
    return tuple(sizes)


def _shared(sizes: Sequence[int] | None, x: Tensor, dim: int, axis: Axis) -> Sizes:
    """Check and return the sizes of all ranks' parts of a dim of which this rank has one part."""
    chosen = (x.shape[dim],) * axis.size if sizes is None else tuple(sizes)
    if len(chosen) != axis.size or min(chosen) < 0 or chosen[axis.rank] != x.shape[dim]:
        raise ValueError(
            f"{axis.name}: sizes {chosen} are not those of {axis.size} ranks of which rank {axis.rank} has dim {dim} of {tuple(x.shape)}"
        )
    return chosen
