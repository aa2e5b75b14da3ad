"""A content is in one split: what is held out under one name is trained on under no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from .tables import Sample


class HasSplit(Protocol):
    """A sample, or a row that becomes one."""

    @property
    def split(self) -> str: ...

    @property
    def content_id(self) -> str: ...


T = TypeVar("T", bound=HasSplit)


def copies_of_held_out(things: Sequence[T]) -> list[T]:
    """Those of split `train` whose content another one holds out."""
    held = _held_out(things)
    return [one for one in things if one.split == "train" and one.content_id in held]


def hold_out_copies(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, those of held-out contents in split `val` whatever their own mark says."""
    held = _held_out(samples)
    return [dataclasses.replace(one, split="val") if one.content_id in held else one for one in samples]


def _held_out(things: Iterable[HasSplit]) -> set[str]:
    return {one.content_id for one in things if one.split == "val" and one.content_id}
