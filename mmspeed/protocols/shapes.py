"""Shape classes: items of one class meet in a micro-batch, and cost alike where the task knows no more of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


def shape_words(shape: ShapeClass) -> str:
    """A shape class in messages: its own words, such as `49x176x320`, where it has some, else its name."""
    return shape.name if type(shape).__str__ is object.__str__ else str(shape)


@runtime_checkable
class ShapeClass(Protocol):
    """A group of items whose tensors have the same shapes, such as a video bucket or packs of 4,096 tokens.

    Hashable and ordered; the order is that in which classes stand in a step. `name` is unique, and stands in files.
    """

    @property
    def name(self) -> str:
        """The name of the class in files, such as `049x0176x0320`."""
        ...

    @property
    def splits(self) -> bool:
        """Whether an item is computed by a sequence-parallel group together; else each of its ranks has items of its own."""
        ...

    @property
    def numbers(self) -> int:
        """The size of an item in any unit that all classes share (pixels, tokens); its cost where no other is known."""
        ...

    def __lt__(self, other: Any, /) -> bool: ...

    def __hash__(self) -> int: ...
