"""An axis of the device mesh for collectives: its process group, this rank's place on it, and the ledger of its bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmspeed.axes import AxisName

ExchangeMethod = Literal["collective", "point_to_point"]
Link = Literal["inner", "outer"]  # within a node, between nodes

# what a wait for messages over these axes is a wait at; others are not timed
WAITED_AT = {
    "experts": (AxisName.EP, AxisName.EP_OUTER, AxisName.EP_INNER, AxisName.ETP),
    "attention": (AxisName.DSP, AxisName.RING, AxisName.ULYSSES),
}
_PLACES = {axis.value: place for place, axes in WAITED_AT.items() for axis in axes}
GivesWay = Callable[[str | None, Callable[[], None]], None]


class Ledger:
    """Counts of bytes that this rank sends, of calls and of copies, by kind and axis. The caller that wants to count passes one in.

    Bytes to this rank itself do not count. `copies` are passes over an exchange's tensors, by (kind, axis, side): "pack" copies parts into
    the order of the message, "unpack" received parts into the order of the results; an exchange makes at most one on each side. `copied`
    are the bytes that these passes move; tensors that are in the right order already add none. `by_link` are the bytes sent by (kind, axis,
    link): "inner" to ranks of the same node, "outer" to those of other nodes (`Axis.nodes`). `waiting` makes a context of each wait for
    messages, of its place (`WAITED_AT`); None: waits are not timed. `gives_way` is called with an exchange's place and the function that
    waits for it, so that something else may be computed before; None: the exchange is just waited for.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()  # (kind, axis)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str, str]] = Counter()  # (kind, axis, "pack" or "unpack")
        self.copied: Counter[tuple[str, str, str]] = Counter()  # bytes, likewise
        self.by_link: Counter[tuple[str, str, Link]] = Counter()  # (kind, axis, link)
        self.waiting: Callable[[str], AbstractContextManager[object]] | None = None
        self.gives_way: GivesWay | None = None
        self._watchers: list[tuple[frozenset[str], Ledger]] = []

    def add(
        self,
        kind: str,
        axis: str,
        sent: int,
        packs: int = 0,
        unpacks: int = 0,
        belongs_to: str | None = None,
        outer: int = 0,
        packed: int = 0,
        unpacked: int = 0,
    ) -> None:
        """Count a call under the name `axis`: `sent` bytes, with `packs` copies before and `unpacks` after it.

        `belongs_to`: the axis by which blocks of `ledger` select the call, where it is counted under another name. `outer`: those of the
        `sent` bytes that go to other nodes. `packed`, `unpacked`: bytes of the copies.
        """
        self.bytes[kind, axis] += sent
        self.calls[kind, axis] += 1
        links: tuple[tuple[Link, int], ...] = (("inner", sent - outer), ("outer", outer))
        for link, of_link in links:
            if of_link:
                self.by_link[kind, axis, link] += of_link
        for side, copies, moved in (("pack", packs, packed), ("unpack", unpacks, unpacked)):
            if copies:
                self.copies[kind, axis, side] += copies
            if moved:
                self.copied[kind, axis, side] += moved
        for names, watcher in self._watchers:
            if (belongs_to or axis) in names:
                watcher.add(kind, axis, sent, packs, unpacks, outer=outer, packed=packed, unpacked=unpacked)

    def total(self, axis: str | None = None, kind: str | None = None, link: Link | None = None) -> int:
        """Bytes sent over an axis, as a kind and over a link; None: over all axes, as all kinds, over both links."""
        return sum(
            count
            for (what, of, over), count in self.by_link.items()
            if axis in (None, of) and kind in (None, what) and link in (None, over)
        )

    def clear(self) -> None:
        """Reset all counts to 0."""
        for counter in (self.bytes, self.calls, self.copies, self.copied, self.by_link):
            counter.clear()

    def since(self, before: Ledger) -> Ledger:
        """The counts added since `before`, an earlier `copy`."""
        rest = Ledger()
        rest.bytes, rest.calls = self.bytes - before.bytes, self.calls - before.calls
        rest.copies, rest.copied = self.copies - before.copies, self.copied - before.copied
        rest.by_link = self.by_link - before.by_link
        return rest

    def copy(self) -> Ledger:
        """A copy of the counts up to now."""
        return self.since(Ledger())


@contextmanager
def ledger(*axes: Axis) -> Iterator[Ledger]:
    """Count what these axes send inside the block in a ledger of its own; their own ledgers go on counting. Axes may share a ledger.

    Backward passes are counted when they run. What an axis counts under another name (`pass_on`) has that name here too.
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
            of._watchers = [other for other in of._watchers if other is not watcher]


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh: its process group, its size and this rank's place on it.

    `exchange`: the backend's collectives, or sends and receives between pairs. `nodes`: the node of each place; empty: all on one.
    """

    name: str
    group: dist.ProcessGroup | None
    size: int
    rank: int
    ledger: Ledger = field(default_factory=Ledger)
    exchange: ExchangeMethod = "collective"
    nodes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        name: str,
        ledger: Ledger | None = None,
        exchange: ExchangeMethod = "collective",
        nodes: Sequence[int] | None = None,
    ) -> Axis:
        """The axis `name` of a mesh. `nodes`: the node of each rank of the run; None: `launched_nodes`."""
        part = mesh[name]
        counted, ranks = Ledger() if ledger is None else ledger, part.mesh.tolist()
        places = nodes_of(ranks, nodes)
        return cls(name, part.get_group(), part.size(), part.get_local_rank(), counted, exchange, places)

    @classmethod
    def alone(cls, name: str) -> Axis:
        """An axis of one rank, over which nothing is sent."""
        return cls(name, None, 1, 0)

    def peer(self, place: int) -> int:
        """The global rank of a place on this axis; places wrap around, as on a ring."""
        return dist.get_global_rank(self.group, place % self.size) if self.group is not None else 0

    def others(self) -> list[int]:
        """The places of the other ranks."""
        return [place for place in range(self.size) if place != self.rank]

    @property
    def place(self) -> str | None:
        """What a wait for its messages is a wait at (`WAITED_AT`); None: one that is not timed."""
        return _PLACES.get(self.name)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for messages in the order in which they were issued; on an accelerator the current stream waits, not the host."""
        waiting, place = self.ledger.waiting, self.place
        with nullcontext() if waiting is None or place is None else waiting(place):
            for work in works:
                work.wait()

    def count(
        self,
        kind: str,
        sent: int | Sequence[int],
        packs: int = 0,
        unpacks: int = 0,
        name: str | None = None,
        packed: int = 0,
        unpacked: int = 0,
    ) -> None:
        """Count a call in the ledger, under the axis's name or another; an axis of one rank counts nothing.

        `sent`: bytes to each place, where this rank's own entry is ignored; a single number goes to the next place, as on a ring. `packs`,
        `unpacks`: copies before and after, of `packed` and `unpacked` bytes.
        """
        if self.size == 1:
            return
        if isinstance(sent, int):
            sent = [sent if place == (self.rank + 1) % self.size else 0 for place in range(self.size)]
        far = [self.nodes[place] != self.nodes[self.rank] for place in range(self.size)] if self.nodes else None
        outer = sum(sent[place] for place in self.others() if far[place]) if far else 0
        total = sum(sent[place] for place in self.others())
        copies = {"packs": packs, "unpacks": unpacks, "packed": packed, "unpacked": unpacked}
        self.ledger.add(kind, name or self.name, total, belongs_to=self.name, outer=outer, **copies)


def launched_nodes(world: int) -> tuple[int, ...]:
    """The node of each rank of a run, from the launcher's LOCAL_WORLD_SIZE; a single node where it is unset or does not divide `world`."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return tuple(rank // local if local > 0 and world % local == 0 else 0 for rank in range(world))


def nodes_of(ranks: Sequence[int], nodes: Sequence[int] | None) -> tuple[int, ...]:
    """The nodes of the given ranks. `nodes`: the node of every rank of the run; None: `launched_nodes`.

    Raises ValueError where `nodes` has another length than the run has ranks.
    """
    world = dist.get_world_size()
    if nodes is not None and len(nodes) != world:
        raise ValueError(f"a map of {len(nodes)} ranks to nodes, but the run has {world}")
    known = launched_nodes(world) if nodes is None else nodes
    return tuple(known[rank] for rank in ranks)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
