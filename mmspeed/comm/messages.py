"""Pack the messages of an exchange and issue them without waiting; wait for and unpack them later.

A move describes an exchange by arguments that are the same on all ranks: `begin` packs, issues and counts the messages, `Underway.complete`
waits and returns the results, and `back` is the move that carries the gradients. Autograd is in `halves`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from .axis import Axis, nbytes
from .packing import Landing, Packed, Sizes, landing, leads, lengths_of, pack

# newer torch has other names for these, and warns of the old ones
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Underway:
    """An issued exchange. The tensors in `sent` must neither change nor be freed before `wait`. short: its messages are a few numbers."""

    axis: Axis
    works: list[Any]  # of torch.distributed
    sent: list[Tensor]
    land: Callable[[], tuple[Tensor, ...]]  # the results, once the messages have come
    short: bool = False

    def wait(self) -> None:
        """Wait for the messages (`Axis.wait`)."""
        self.axis.wait(self.works)


class Move(Protocol):
    """The description of an exchange, the same on all ranks of its axis."""

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        """Issue the exchange without waiting. `layouts`: the memory order of each result's dims, which may differ between ranks."""
        ...

    def back(self) -> Move:
        """The move of the gradients."""
        ...


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all of k tensors over n ranks. `wire`: the order of the dims in the message; `apart`: one message for each tensor.

    A message of several tensors costs a copy into a common buffer. So where the scatter dim is outermost on the wire, and each part
    contiguous in its tensor, every tensor is sent in a message of its own, from its own memory. Where the gather dim is outermost, the
    common message interleaves the tensors row by row (see `packing`).
    """

    axis: Axis
    scatter_dim: int
    gather_dim: int
    scatter: tuple[Sizes, ...]  # (k) of (n)
    gather: tuple[Sizes, ...]  # (k) of (n)
    wire: Sizes
    apart: bool = False

    def back(self) -> AllToAll:
        """The move of the gradients, with the dims swapped: what this one packs, that one unpacks."""
        return AllToAll(self.axis, self.gather_dim, self.scatter_dim, self.gather, self.scatter, self.wire, self.apart)

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        one_by_one = self.apart or all(leads(x.shape, self.scatter_dim, self.gather_dim, self.wire) for x in xs)
        each = range(len(xs))
        groups = [[of] for of in each] if one_by_one else [list(each)]
        messages = [self._message(xs, layouts, group) for group in groups]
        sends = [sum(sent) for sent in zip(*(packed.bytes_to_each() for packed, _, _ in messages), strict=True)]
        packed, unpacked = sum(sent.copied() for sent, _, _ in messages), sum(came.copied() for _, came, _ in messages)
        packs, unpacks = max(sent.copies for sent, _, _ in messages), max(bool(came.copies) for _, came, _ in messages)
        self.axis.count("all_to_all", sends, packs, int(unpacks), packed=packed, unpacked=unpacked)
        works = [work for _, _, of_message in messages for work in of_message]
        return Underway(
            self.axis,
            works,
            [sent.flat for sent, _, _ in messages],
            lambda: tuple(x for _, came, _ in messages for x in came.fill()),
        )

    def _message(
        self, xs: Sequence[Tensor], layouts: Sequence[Sizes], group: list[int]
    ) -> tuple[Packed, Landing, list[Any]]:
        """Issue one message with the tensors numbered in `group`: (what is sent, where it arrives, the pending works)."""
        axis, wire, xs, layouts = self.axis, self.wire, [xs[of] for of in group], [layouts[of] for of in group]
        scatters, gathers = [self.scatter[of] for of in group], [self.gather[of] for of in group]
        rows = len(xs) > 1 and all(leads(x.shape, self.gather_dim, self.scatter_dim, wire) for x in xs)
        if rows:  # moved to the front: all dims before it have size 1
            wire = (self.gather_dim, *(dim for dim in wire if dim != self.gather_dim))
        sent = pack(xs, self.scatter_dim, scatters, wire, rows)
        shapes = []
        for x, scatter, gather in zip(xs, scatters, gathers, strict=True):
            shape = list(x.shape)
            shape[self.scatter_dim], shape[self.gather_dim] = scatter[axis.rank], sum(gather)
            shapes.append(shape)
        comes = lengths_of(shapes, self.gather_dim, gathers)
        came = landing(sent.flat, shapes, self.gather_dim, gathers, wire, layouts, rows)
        return sent, came, _swap(sent.flat, came.flat, sent.lengths, comes, axis)


@dataclass(frozen=True)
class AllGather:
    """An all-gather along a dim. Uneven ones, and those of an axis without collectives, are sends and receives between pairs."""

    axis: Axis
    dim: int
    sizes: Sizes

    def back(self) -> ReduceScatter:
        """The move of the gradients."""
        return ReduceScatter(self.axis, self.dim, self.sizes)

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        (x,), axis, dim, sizes = xs, self.axis, self.dim, self.sizes
        flat_here, wire = x.contiguous().view(-1), tuple(range(x.dim()))
        shape = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
        came = landing(x, [shape], dim, [sizes], wire, [wire])
        flat = came.flat
        if axis.exchange == "collective" and len(set(sizes)) == 1:
            works = [_ALL_GATHER(flat, flat_here, group=axis.group, async_op=True)]
        else:
            parts = flat.split(lengths_of([shape], dim, [sizes]))
            others = axis.others()
            works = between([(place, flat_here) for place in others], [(place, parts[place]) for place in others], axis)
            parts[axis.rank].copy_(flat_here)
        packs, unpacks, sent = int(not x.is_contiguous()), int(bool(came.copies)), [nbytes(flat_here)] * axis.size
        axis.count("all_gather", sent, packs, unpacks, packed=packs * nbytes(flat_here), unpacked=came.copied())
        return Underway(axis, works, [flat_here], came.fill)


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter along a dim. Uneven ones, and those of an axis without collectives, are an all-to-all and a local sum."""

    axis: Axis
    dim: int
    sizes: Sizes

    def back(self) -> AllGather:
        """The move of the gradients."""
        return AllGather(self.axis, self.dim, self.sizes)

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        (x,), axis, dim, sizes = xs, self.axis, self.dim, self.sizes
        sent = pack([x], dim, [sizes], tuple(range(x.dim())))
        shape = [*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :]]
        axis.count("reduce_scatter", sent.bytes_to_each(), sent.copies, packed=sent.copied())
        if axis.exchange == "collective" and len(set(sizes)) == 1:
            result = x.new_empty(shape)
            work = _REDUCE_SCATTER(result.view(-1), sent.flat, group=axis.group, async_op=True)
            return Underway(axis, [work], [sent.flat], lambda: (result,))
        parts = x.new_empty([axis.size, *shape])
        works = _swap(sent.flat, parts.view(-1), sent.lengths, [parts.numel() // axis.size] * axis.size, axis)
        return Underway(axis, works, [sent.flat], lambda: (parts.sum(0, dtype=x.dtype),))


@dataclass(frozen=True)
class RowMove:
    """An all-to-all of rows of x_ZE: `sends[r]` go to rank r, `comes[r]` come from it. `kind`: the ledger's name for the bytes."""

    axis: Axis
    sends: Sizes
    comes: Sizes
    kind: str

    def back(self) -> RowMove:
        """The move of the gradients."""
        return RowMove(self.axis, self.comes, self.sends, self.kind)

    def begin(self, xs: Sequence[Tensor], layouts: Sequence[Sizes]) -> Underway:
        (x_ZE,), axis = xs, self.axis
        width, received = math.prod(x_ZE.shape[1:]), x_ZE.new_empty((sum(self.comes), *x_ZE.shape[1:]))
        flat, lengths = x_ZE.contiguous().view(-1), [n * width for n in self.sends]
        works = _swap(flat, received.view(-1), lengths, [n * width for n in self.comes], axis)
        packs = int(not x_ZE.is_contiguous())
        axis.count(self.kind, [n * x_ZE.element_size() for n in lengths], packs, packed=packs * nbytes(flat))
        return Underway(axis, works, [flat], lambda: (received,), short=self.kind == "counts")


def _swap(flat: Tensor, received: Tensor, sends: list[int], comes: list[int], axis: Axis) -> list[Any]:
    """Issue an all-to-all of flat buffers: `sends[r]` elements of `flat` to rank r, `comes[r]` elements of `received` from it."""
    if axis.exchange == "collective":
        return [dist.all_to_all_single(received, flat, comes, sends, group=axis.group, async_op=True)]
    to, source, others = flat.split(sends), received.split(comes), axis.others()
    works = between([(place, to[place]) for place in others], [(place, source[place]) for place in others], axis)
    source[axis.rank].copy_(to[axis.rank])
    return works


def between(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], axis: Axis) -> list[Any]:
    """Issue sends to and receives from places of the axis. Empty tensors are sent too, so that every rank takes part."""
    ops = [dist.P2POp(dist.isend, tensor, axis.peer(place), axis.group) for place, tensor in sends]
    ops += [dist.P2POp(dist.irecv, tensor, axis.peer(place), axis.group) for place, tensor in receives]
    return list(dist.batch_isend_irecv(ops)) if ops else []
