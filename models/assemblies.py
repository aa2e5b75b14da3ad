"""Tensors that are put together from those of files: read part by part, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.protocols import Part

Shape = tuple[int, ...]
Read = Callable[[str, Part], Tensor]


@dataclass(frozen=True)
class Joined:
    """Parts that lie one behind the other along the first dim."""

    parts: tuple[Assembly, ...]


@dataclass(frozen=True)
class Stacked:
    """Parts that lie along a first dim of their own; all have one shape."""

    parts: tuple[Assembly, ...]


Assembly = str | Joined | Stacked  # a name stands for a tensor of a file


def names_in(assembly: Assembly) -> Iterator[str]:
    """Yield the names of the files' tensors, in their order."""
    if isinstance(assembly, str):
        yield assembly
    else:
        for part in assembly.parts:
            yield from names_in(part)


def shape_of(assembly: Assembly, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of an assembled tensor; None where parts are missing or do not fit together."""
    if isinstance(assembly, str):
        return shapes.get(assembly)
    parts = [shape_of(part, shapes) for part in assembly.parts]
    first = parts[0]
    if isinstance(assembly, Stacked):
        return None if first is None or any(part != first for part in parts) else (len(parts), *first)
    rows = 0
    for part in parts:
        if first is None or part is None or not part or part[1:] != first[1:]:
            return None
        rows += part[0]
    return None if first is None else (rows, *first[1:])


def read_part(assembly: Assembly, part: Part, shapes: Mapping[str, Shape], read: Read) -> Tensor:
    """A part of an assembled tensor, from the parts of files that it consists of; no other bytes are read."""
    if isinstance(assembly, str):
        return read(assembly, part)
    rows, inner = part[0], part[1:]
    if isinstance(assembly, Stacked):
        if rows.start >= rows.stop:  # a process without any
            nothing = read_part(assembly.parts[0], _nothing(inner), shapes, read)
            return nothing.new_empty((0, *(one.stop - one.start for one in inner)))
        chosen = assembly.parts[rows.start : rows.stop]
        return torch.stack([read_part(one, inner, shapes, read) for one in chosen])
    if rows.start >= rows.stop:
        return read_part(assembly.parts[0], part, shapes, read)
    pieces, begin = [], 0
    for one in assembly.parts:
        shape = shape_of(one, shapes)
        assert shape is not None
        start, stop = max(rows.start, begin) - begin, min(rows.stop - begin, shape[0])
        if start < stop:
            pieces.append(read_part(one, (slice(start, stop), *inner), shapes, read))
        begin += shape[0]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _nothing(part: Part) -> Part:
    return (slice(0, 0), *part[1:])


def part_shapes(assembly: Assembly, shape: Shape) -> dict[str, Shape]:
    """The shape of each of the files' tensors that a tensor of this shape consists of; parts of a joined one are equal.

    Raises ValueError for a shape that cannot be taken apart so.
    """
    if isinstance(assembly, str):
        return {assembly: shape}
    count = len(assembly.parts)
    shapes: dict[str, Shape] = {}
    if isinstance(assembly, Stacked):
        if shape[0] != count:
            raise ValueError(f"a tensor of {shape} does not consist of {count} stacked ones")
        inner = shape[1:]
    else:
        if shape[0] % count:
            raise ValueError(f"a tensor of {shape} does not consist of {count} equal ones")
        inner = (shape[0] // count, *shape[1:])
    for part in assembly.parts:
        shapes |= part_shapes(part, inner)
    return shapes


def taken_apart(assembly: Assembly, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the files' tensors that an assembled one consists of, as views; parts of a joined one are equal."""
    if isinstance(assembly, str):
        yield assembly, tensor
        return
    values = tensor.unbind(0) if isinstance(assembly, Stacked) else tensor.chunk(len(assembly.parts))
    for part, value in zip(assembly.parts, values, strict=True):
        yield from taken_apart(part, value)
