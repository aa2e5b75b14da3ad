"""Differentiable exchanges of tensors over an axis of the mesh. Every call is counted (`Axis.ledger`).

Rank r of n holds `sizes[r]` of a dim that is split; sizes may be uneven and zero. A message is one flat buffer: first the part for
rank 0, then that for rank 1, and so on, each in the order of the dims that the receiver asked for. So a transpose (B, S, H) <->
(S, B, H) before or after an exchange is merged with the copy into or out of the buffer, of which there is at most one on each side and
none where the parts already have that order. The order in the message, and the number of messages, depend on arguments that all ranks
share and never on a rank's own strides, which may differ where a dim has size 0 or 1.

Each exchange is the finish of its start (`halves`); `start_all_to_all` and the like run the first half alone, and work issued before
`finish` overlaps with the messages. The same rules hold for both: results are offered for recomputation, and all ranks of the axis make
the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.graphs import outside_graphs
from mmspeed.replay import record_or_replay

from .axis import Axis, nbytes
from .halves import PendingExchange, finish, start
from .messages import AllGather, AllToAll, ReduceScatter, RowMove, between, wait_all
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
    """Exchange a tensor that is whole along `scatter_dim` and split along `gather_dim` for one that is split and whole the other way.

    Args:
        x: this rank's part.
        scatter_sizes: the size of `scatter_dim` that each rank receives; None: even sizes.
        gather_sizes: the size of `gather_dim` that each rank holds; None: as much as this rank.
        order: the result's dims from the outermost in memory to the innermost; `result.permute(order)` is contiguous. None: the
            order of the shape. The result's shape does not depend on it.
        wire: the order of the dims in the message, the same on all ranks; None: `order`.
        grad_order: the order of the gradient's dims in memory; None: that of `x`.

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

    All have the same number of dims, number type and size of `gather_dim`; `scatter_sizes_each` has the sizes of each tensor. They are
    sent in one message, or each in its own where that saves a copy (`messages.AllToAll`). Where `gather_dim` comes first on the wire
    and the results have its order, they stay side by side in the receive buffer: `result.permute(order)` has contiguous rows, with the
    rows of the other tensors in between. `apart`: a message for each, so that each result is contiguous.
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
    """The parts of all ranks, joined along `dim`. Backward: `reduce_scatter`, so gradients of all ranks are summed.

    `sizes`: the size of `dim` that each rank holds; None: as much as this rank. Raises ValueError for sizes that do not fit.
    """
    return finish(start_all_gather(x, axis, dim, sizes))


def start_all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> PendingExchange:
    """The first half of `all_gather`; `finish` is the second."""
    dim = _dim(dim, x.dim())
    parts = _shared(sizes, x, dim, axis)
    return PendingExchange([x]) if axis.size == 1 else start(AllGather(axis, dim, parts), [_natural(x)], [x])


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The part of this rank, along `dim`, of the sum of `x` over all ranks. Backward: `all_gather`.

    `sizes`: the size of `dim` that each rank receives; None: even sizes. Uneven ones, and `point_to_point`, use an all-to-all and a local
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
    """Rows that this rank sends to each rank of an axis, and rows that come from each; any may be 0."""

    sends: tuple[int, ...]
    comes: tuple[int, ...]

    def back(self) -> RowCounts:
        """The counts of the same rows on their return."""
        return RowCounts(self.comes, self.sends)


@outside_graphs
def row_counts(sends_R: Tensor, axis: Axis) -> RowCounts:
    """Exchange row counts that are known at run time: `sends_R` (whole numbers, one for each rank), in a message of 8 bytes a rank.

    The host reads them, since it must know the sizes of messages; so call this before, not between, the halves of another exchange. A
    recomputation (`mmspeed.replay`) gets the counts of the first pass. Raises ValueError for another number of counts.
    """
    if sends_R.shape != (axis.size,) or sends_R.is_floating_point():
        raise ValueError(f"{axis.name}: counts for {axis.size} ranks are whole numbers of shape ({axis.size},)")

    def exchanged() -> RowCounts:
        ones = (1,) * axis.size
        with torch.no_grad():
            counts = sends_R.detach().long()
            sends, comes = torch.stack((counts, swap_rows(counts, axis, RowCounts(ones, ones), "counts"))).tolist()
        return RowCounts(tuple(sends), tuple(comes))

    return record_or_replay(exchanged)[0]


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
    """Send `counts.sends[r]` rows to each rank r and receive `counts.comes[r]` from it, in rank order. Backward: the reverse.

    Args:
        x_ZE: rows (of any shape) for rank 0 first, `counts.sends[0]` of them, then those for rank 1. A rank may get none.
        counts: from the host, or from `row_counts`.
        kind: the ledger's name for the bytes.

    Raises ValueError for numbers of rows that do not fit.
    """
    return finish(start_rows(x_ZE, axis, counts, kind))


class PendingTensors:
    """Tensors in transit. Holds the tensors that are sent until `wait`."""

    def __init__(self, received: list[Tensor], works: list[Any], sent: list[Tensor]) -> None:
        self._received, self._works, self._sent = received, works, sent

    @outside_graphs
    def wait(self) -> list[Tensor]:
        """The received tensors; on an accelerator the current stream waits for them, not the caller. May be called again."""
        wait_all(self._works)
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
    """Start sending tensors to place `to` of the axis and receiving as many from place `source`, without gradients.

    Every rank of the axis makes the call, and the places form rings: the rank that sends to a place is that place's source. Several calls
    may be in flight; those between two ranks arrive in the order of the calls. Until `wait`, tensors that are sent must not change.

    Args:
        shapes: the shapes to receive, in the number types of `tensors`; None: shapes as sent.
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
        return PendingTensors([tensor.detach() for tensor in tensors], [], [])
    sent = [tensor.detach().contiguous() for tensor in tensors]
    packs = sum(not tensor.is_contiguous() for tensor in tensors)
    received = [tensor.new_empty(shape) for tensor, shape in zip(sent, expected, strict=True)]
    bytes_to = [sum(map(nbytes, sent)) if place == to else 0 for place in range(axis.size)]
    packed = sum(nbytes(tensor) for tensor in tensors if not tensor.is_contiguous())
    axis.count(kind, bytes_to, packs, 0, name, packed=packed)
    return PendingTensors(
        received, between([(to, tensor) for tensor in sent], [(source, t) for t in received], axis), sent
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
    """Sizes of all ranks' parts of a dim that is whole on this rank."""
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
