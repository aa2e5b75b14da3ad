"""Shape classes: items of one class may share a micro-batch, and cost the same unless the task knows better."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


def shape_words(shape: ShapeClass) -> str:
    """A shape class in messages: its own `str`, such as `49x176x320`, where it defines one, else its name."""
    return shape.name if type(shape).__str__ is object.__str__ else str(shape)


@runtime_checkable
class ShapeClass(Protocol):
    """A group of items whose tensors have the same shapes, such as a video bucket or packs of 4,096 tokens.

    Hashable and ordered; the order is that of the classes in a step. `name` is unique, and is written to files.
    """

    @property
    def name(self) -> str:
        """The name of the class in files, such as `049x0176x0320`."""
        ...

    @property
    def splits(self) -> bool:
        """True where a sequence-parallel group computes an item together; else each of its ranks has items of its own."""
        ...

    @property
    def numbers(self) -> int:
        """The size of an item in any unit that all classes share (pixels, tokens); its cost where no other is known."""
        ...

    def __lt__(self, other: Any, /) -> bool: ...

    def __hash__(self) -> int: ...
