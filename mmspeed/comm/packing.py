"""Lay out the parts of tensors in a message's flat buffer: sizes by rank, views and copies, without a process group.

The buffer holds the part for rank 0, then that for rank 1, and so on. A rank's part holds its piece of each tensor of the message, one
piece after the other, with the dims in the order of the wire. With `rows`, where the dim that the receiver concatenates is outermost on the
wire, it interleaves the tensors instead: each row holds that row of every tensor. The rows of all ranks, one after the other, are then the
concatenated tensors side by side, which the receiver reads in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .axis import nbytes

Sizes = tuple[int, ...]


def even_sizes(length: int, parts: int) -> Sizes:
    """Sizes of `parts` parts of `length` that differ by one at most, the larger ones first. Some may be 0.

    Raises ValueError for a negative length or less than one part.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"a length of {length} cannot be cut into {parts} parts")
    whole, more = divmod(length, parts)
    return tuple(whole + (part < more) for part in range(parts))


@dataclass(frozen=True)
class Packed:
    """A packed message: the next `lengths[r]` elements of the flat buffer go to rank r. `copies`: whether packing copied, 0 or 1."""

    flat: Tensor
    lengths: list[int]
    copies: int

    def bytes_to_each(self) -> list[int]:
        """Bytes for each rank, this one included."""
        return [length * self.flat.element_size() for length in self.lengths]

    def copied(self) -> int:
        """Bytes that packing copied."""
        return self.copies * nbytes(self.flat)


@dataclass(frozen=True)
class Landing:
    """Memory for a message that is received: `flat` receives it, and `fill` makes `copies` from there into `results`."""

    results: list[Tensor]
    flat: Tensor
    copies: list[tuple[Tensor, Tensor]]  # (to, from)

    def copied(self) -> int:
        """Bytes that `fill` copies."""
        return sum(nbytes(to) for to, _ in self.copies)

    def fill(self) -> tuple[Tensor, ...]:
        """Make the copies, once the message has arrived, and return the results."""
        for to, source in self.copies:
            to.copy_(source)
        return tuple(self.results)


def pack(xs: Sequence[Tensor], dim: int, sizes_each: Sequence[Sizes], wire: Sizes, rows: bool = False) -> Packed:
    """Pack the tensors' parts along `dim`, rank by rank; a single tensor that is in this order already is not copied.

    `rows`: interleave the tensors by rows of the first dim of the wire (see the module's docstring).
    """
    lengths = lengths_of([x.shape for x in xs], dim, sizes_each)
    arranged = [x.permute(wire) for x in xs]
    if len(xs) == 1 and _outermost(arranged[0].shape, wire.index(dim)) and arranged[0].is_contiguous():
        return Packed(arranged[0].view(-1), lengths, 0)
    flat = xs[0].new_empty(sum(lengths))
    pieces = _rows if rows else _pieces
    for in_buffer, in_tensor in pieces(flat, arranged, wire.index(dim), sizes_each):
        in_buffer.copy_(in_tensor)
    return Packed(flat, lengths, 1)


def landing(
    like: Tensor,
    shapes: Sequence[Sequence[int]],
    dim: int,
    sizes_each: Sequence[Sizes],
    wire: Sizes,
    layouts: Sequence[Sizes],
    rows: bool = False,
) -> Landing:
    """Allocate memory to receive tensors of `shapes`, whose parts along `dim` come from the ranks.

    Where parts arrive in the memory order of the results (`layouts`), the buffer is the results' own memory and nothing is copied. With
    `rows` the results stay side by side in it: in the order of their layouts, but with gaps between rows. Autograd forbids in-place writes
    to a view that a custom function returns, so they are made on the same storage without being views.
    """
    ordered = [_same(shape, wire, order) for shape, order in zip(shapes, layouts, strict=True)]
    if rows:
        flat = like.new_empty(sum(map(math.prod, shapes)))
        columns = _columns(flat, shapes, wire)
        results = [
            x if fits else _empty(like, shape, order)
            for x, fits, shape, order in zip(columns, ordered, shapes, layouts, strict=True)
        ]
        return Landing(results, flat, [(to, x) for to, x in zip(results, columns, strict=True) if to is not x])
    results = [_empty(like, shape, order) for shape, order in zip(shapes, layouts, strict=True)]
    if len(shapes) == 1 and ordered[0] and _outermost([shapes[0][of] for of in wire], wire.index(dim)):
        return Landing(results, results[0].permute(wire).view(-1), [])
    flat = like.new_empty(sum(map(math.prod, shapes)))
    pieces = _pieces(flat, [x.permute(wire) for x in results], wire.index(dim), sizes_each)
    return Landing(results, flat, [(in_tensor, in_buffer) for in_buffer, in_tensor in pieces])


def _columns(flat: Tensor, shapes: Sequence[Sequence[int]], wire: Sizes) -> list[Tensor]:
    """The tensors that lie side by side in the rows of `flat`, one row for each index of the first dim of the wire."""
    count = shapes[0][wire[0]]
    width, start, tensors = sum(math.prod(shape) for shape in shapes) // max(1, count), 0, []
    for shape in shapes:
        strides = _strides(shape, wire)
        strides[wire[0]] = width
        x = torch.empty(0, dtype=flat.dtype, device=flat.device)
        x.set_(flat.untyped_storage(), flat.storage_offset() + start, tuple(shape), tuple(strides))  # type: ignore[call-overload]
        tensors.append(x)
        start += math.prod(shape) // max(1, count)
    return tensors


def _rows(
    flat: Tensor, arranged: Sequence[Tensor], place: int, sizes_each: Sequence[Sizes]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`_pieces` of a message in rows, on the sender's side."""
    ranks, rows = len(sizes_each[0]), arranged[0].shape[0]
    if all(len(set(sizes)) == 1 for sizes in sizes_each):
        even = [
            x.unflatten(place, (ranks, sizes[0])).movedim(place, 0)
            for x, sizes in zip(arranged, sizes_each, strict=True)
        ]
        widths = [math.prod(parts.shape[2:]) for parts in even]
        block, across = flat.view(ranks, rows, sum(widths)), 0
        for parts, width in zip(even, widths, strict=True):
            yield block[:, :, across : across + width].unflatten(2, parts.shape[2:]), parts
            across += width
        return
    split, start = [x.split(sizes, place) for x, sizes in zip(arranged, sizes_each, strict=True)], 0
    for rank in range(ranks):
        widths = [math.prod(parts[rank].shape[1:]) for parts in split]
        block, across = flat[start : start + rows * sum(widths)].view(rows, sum(widths)), 0
        for parts, width in zip(split, widths, strict=True):
            part = parts[rank]
            yield block[:, across : across + width].unflatten(1, part.shape[1:]), part
            across += width
        start += block.numel()


def _pieces(
    flat: Tensor, arranged: Sequence[Tensor], place: int, sizes_each: Sequence[Sizes]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of each piece, (in the flat buffer, in its tensor), to copy between; the tensors' dims are in the order of the wire."""
    ranks = len(sizes_each[0])
    start = 0
    if all(len(set(sizes)) == 1 for sizes in sizes_each):  # one copy a tensor, not one for each rank
        rows = flat.view(ranks, flat.numel() // ranks)
        for x, sizes in zip(arranged, sizes_each, strict=True):
            parts = x.unflatten(place, (ranks, sizes[0])).movedim(place, 0)
            length = math.prod(parts.shape[1:])
            yield rows[:, start : start + length].unflatten(1, parts.shape[1:]), parts
            start += length
        return
    split = [x.split(sizes, place) for x, sizes in zip(arranged, sizes_each, strict=True)]
    for rank in range(ranks):
        for parts in split:
            part = parts[rank]
            yield flat[start : start + part.numel()].view(part.shape), part
            start += part.numel()


def lengths_of(shapes: Sequence[Sequence[int]], dim: int, sizes_each: Sequence[Sizes]) -> list[int]:
    """The number of elements in each rank's part of all tensors together, which are split along `dim`."""
    rests = [math.prod([*shape[:dim], *shape[dim + 1 :]]) for shape in shapes]
    return [
        sum(rest * size for rest, size in zip(rests, of_rank, strict=True)) for of_rank in zip(*sizes_each, strict=True)
    ]


def leads(shape: Sequence[int], dim: int, other: int, wire: Sizes) -> bool:
    """True where `dim` is outermost on the wire on every rank: all dims before it have size 1, and none of them is `other`.

    `other`: the dim whose size may differ between ranks, so that a size of 1 here tells nothing about them.
    """
    before = wire[: wire.index(dim)]
    return other not in before and all(shape[of] == 1 for of in before)


def _outermost(shape: Sequence[int], place: int) -> bool:
    """True where parts along the dim at `place` are contiguous: all dims outside it have size 1."""
    return all(size == 1 for size in shape[:place])


def _same(shape: Sequence[int], one: Sizes, other: Sizes) -> bool:
    """True where two orders of a tensor's dims mean the same memory; dims of size 1 do not count."""
    return [dim for dim in one if shape[dim] != 1] == [dim for dim in other if shape[dim] != 1]


def _empty(like: Tensor, shape: Sequence[int], order: Sizes) -> Tensor:
    """An uninitialised tensor, contiguous in this order of its dims."""
    return like.new_empty_strided(tuple(shape), _strides(shape, order))


def _strides(shape: Sequence[int], order: Sizes) -> list[int]:
    """The strides of a tensor that is contiguous in this order of its dims."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return strides


def layout(x: Tensor) -> Sizes:
    """A tensor's dims in memory order, outermost first."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))


def inverse(order: Sizes) -> Sizes:
    """The inverse permutation of an order."""
    return tuple(order.index(dim) for dim in range(len(order)))


def laid_out(x: Tensor, order: Sizes) -> Tensor:
    """`x` with its memory contiguous in this order of its dims; the shape stays."""
    return x.permute(order).contiguous().permute(inverse(order))
