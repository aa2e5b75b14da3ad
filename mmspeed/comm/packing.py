"""How parts of tensors lie in the flat buffer that travels, and who gets how much: arithmetic and views, without a process group.

The buffer holds what rank 0 is to get, then rank 1's, and so on; a rank's part holds a piece of each tensor of the message; a piece holds
its numbers with the dims in the order of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Sizes = tuple[int, ...]


def even_sizes(length: int, parts: int) -> Sizes:
    """Lengths of `parts` parts of `length` that differ by one at most; the first ones are the larger. Some may be 0.

    Raises ValueError for a negative length or less than one part.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"a length of {length} cannot be cut into {parts} parts")
    whole, more = divmod(length, parts)
    return tuple(whole + (part < more) for part in range(parts))


@dataclass(frozen=True)
class Packed:
    """A message to all ranks: `lengths` numbers of the flat buffer to each, made with 0 copies or 1."""

    flat: Tensor
    lengths: list[int]
    copies: int

    def bytes_to_each(self) -> list[int]:
        """Bytes for each rank, this one included."""
        return [length * self.flat.element_size() for length in self.lengths]


def pack(xs: Sequence[Tensor], dim: int, sizes_each: Sequence[Sizes], wire: Sizes) -> Packed:
    """Parts of tensors along `dim`, rank by rank; the tensors themselves where they already lie so."""
    lengths = lengths_of([x.shape for x in xs], dim, sizes_each)
    arranged = [x.permute(wire) for x in xs]
    if len(xs) == 1 and _outermost(arranged[0].shape, wire.index(dim)) and arranged[0].is_contiguous():
        return Packed(arranged[0].view(-1), lengths, 0)
    flat = xs[0].new_empty(sum(lengths))
    for in_buffer, in_tensor in _pieces(flat, arranged, wire.index(dim), sizes_each):
        in_buffer.copy_(in_tensor)
    return Packed(flat, lengths, 1)


def landing(
    like: Tensor, shapes: Sequence[Sequence[int]], dim: int, wire: Sizes, layouts: Sequence[Sizes]
) -> tuple[list[Tensor], Tensor, int]:
    """Memory for tensors of `shapes` whose parts along `dim` are to come: the tensors, the flat buffer that receives, and copies (0 or 1).

    With 0 copies the buffer is the tensor's own memory, since the parts come as they shall lie; else `unpack` fills the tensors.
    The tensors are no views: autograd forbids that a view out of a custom function is written to.
    """
    results = [_empty(like, shape, layout) for shape, layout in zip(shapes, layouts, strict=True)]
    first = [shapes[0][of] for of in wire]
    if len(shapes) == 1 and _outermost(first, wire.index(dim)) and _same(shapes[0], wire, layouts[0]):
        return results, results[0].permute(wire).view(-1), 0
    return results, like.new_empty(sum(map(math.prod, shapes))), 1


def unpack(flat: Tensor, results: Sequence[Tensor], dim: int, sizes_each: Sequence[Sizes], wire: Sizes) -> None:
    """Bring the parts in the buffer to where they belong in the results."""
    for in_buffer, in_tensor in _pieces(flat, [x.permute(wire) for x in results], wire.index(dim), sizes_each):
        in_tensor.copy_(in_buffer)


def _pieces(
    flat: Tensor, arranged: Sequence[Tensor], place: int, sizes_each: Sequence[Sizes]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views of the same numbers, in the flat buffer and in a tensor whose dims stand in the order of the wire."""
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
    """Numbers in each rank's part of tensors that are cut along `dim`, together."""
    rests = [math.prod([*shape[:dim], *shape[dim + 1 :]]) for shape in shapes]
    return [
        sum(rest * size for rest, size in zip(rests, of_rank, strict=True)) for of_rank in zip(*sizes_each, strict=True)
    ]


def _outermost(shape: Sequence[int], place: int) -> bool:
    """Whether parts along a dim lie one behind the other: no dim outside it has another index than 0."""
    return all(size == 1 for size in shape[:place])


def _same(shape: Sequence[int], one: Sizes, other: Sizes) -> bool:
    """Whether two orders of a tensor's dims are one in memory, where dims of size 1 have no place."""
    return [dim for dim in one if shape[dim] != 1] == [dim for dim in other if shape[dim] != 1]


def _empty(like: Tensor, shape: Sequence[int], order: Sizes) -> Tensor:
    """A tensor without contents, contiguous in this order of its dims."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return like.new_empty_strided(tuple(shape), strides)


def layout(x: Tensor) -> Sizes:
    """A tensor's dims from the outermost in memory to the innermost."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))


def _inverse(order: Sizes) -> Sizes:
    return tuple(order.index(dim) for dim in range(len(order)))


def laid_out(x: Tensor, order: Sizes) -> Tensor:
    """The same tensor, contiguous in this order of its dims."""
    return x.permute(order).contiguous().permute(_inverse(order))
