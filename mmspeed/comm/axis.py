"""An axis of the device mesh as collectives see it: its process group, this rank's place on it, and who counts the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Exchange = Literal["collective", "point_to_point"]


class Ledger:
    """Bytes that this rank sends to others, calls, and copies, by kind and axis. Made by whoever wants to count, and passed along.

    `copies` are passes over a tensor to bring its parts into the order in which they travel (`pack`), or those that came into
    the order of the result (`unpack`), by (kind, axis, side); an exchange makes one at most on each side.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()  # (kind, axis)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str, str]] = Counter()  # (kind, axis, "pack" or "unpack")
        self._watchers: list[tuple[frozenset[str], Ledger]] = []

    def add(
        self, kind: str, axis: str, sent: int, packs: int = 0, unpacks: int = 0, belongs_to: str | None = None
    ) -> None:
        """Count a call that sends so many bytes and makes so many copies before and after, under the name `axis`.

        `belongs_to`: the axis whose block (`ledger`) counts it too, when that has another name.
        """
        self.bytes[kind, axis] += sent
        self.calls[kind, axis] += 1
        for side, copies in (("pack", packs), ("unpack", unpacks)):
            if copies:
                self.copies[kind, axis, side] += copies
        for names, watcher in self._watchers:
            if (belongs_to or axis) in names:
                watcher.add(kind, axis, sent, packs, unpacks)

    def total(self, axis: str | None = None, kind: str | None = None) -> int:
        """Bytes sent over an axis, or over all; of a kind, or of all."""
        return sum(count for (what, of), count in self.bytes.items() if axis in (None, of) and kind in (None, what))

    def clear(self) -> None:
        """Begin anew."""
        for counter in (self.bytes, self.calls, self.copies):
            counter.clear()

    def since(self, before: Ledger) -> Ledger:
        """What was counted after `before`, a copy, was taken."""
        rest = Ledger()
        rest.bytes, rest.calls = self.bytes - before.bytes, self.calls - before.calls
        rest.copies = self.copies - before.copies
        return rest

    def copy(self) -> Ledger:
        """What is counted up to now."""
        return self.since(Ledger())


@contextmanager
def ledger(*axes: Axis) -> Iterator[Ledger]:
    """A ledger of what these axes count inside the block, and nothing else; theirs go on counting. Axes may share a ledger.

    Backward passes count when they run. What an axis counts under another name (`pass_on`) is there under that name.
    """
    inside = Ledger()
    watched = {id(axis.ledger): axis.ledger for axis in axes}
    watchers = [(of, (frozenset(axis.name for axis in axes if axis.ledger is of), inside)) for of in watched.values()]
    for of, watcher in watchers:
        of._watchers.append(watcher)
    try:
        yield inside
    finally:
        for of, watcher in watchers:
            of._watchers = [kept for kept in of._watchers if kept is not watcher]


@dataclass(frozen=True)
class Axis:
    """One axis. `exchange` says how exchanges are made: by the backend's collective, or by sends and receives between pairs."""

    name: str
    group: dist.ProcessGroup | None
    size: int
    rank: int
    ledger: Ledger = field(default_factory=Ledger)
    exchange: Exchange = "collective"

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str, ledger: Ledger | None = None, exchange: Exchange = "collective") -> Axis:
        """The axis `name` of a mesh."""
        part = mesh[name]
        counted = Ledger() if ledger is None else ledger
        return cls(name, part.get_group(), part.size(), part.get_local_rank(), counted, exchange)

    @classmethod
    def alone(cls, name: str) -> Axis:
        """An axis of one rank: nothing travels over it."""
        return cls(name, None, 1, 0)

    def peer(self, place: int) -> int:
        """The global rank of a place on this axis; places are counted round."""
        return dist.get_global_rank(self.group, place % self.size) if self.group is not None else 0

    def count(self, kind: str, sent: int, packs: int = 0, unpacks: int = 0, name: str | None = None) -> None:
        """Write into the ledger, under the axis's name or another; nothing for an axis of one rank."""
        if self.size > 1:
            self.ledger.add(kind, name or self.name, sent, packs, unpacks, belongs_to=self.name)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()
