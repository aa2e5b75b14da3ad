"""Signs of life of all ranks: each writes one to the store, and looks at that of the next rank.

A stopped process (SIGSTOP, a frozen container, a node that is gone) cannot say so itself. As each rank looks at one other, the cost of a
rank does not grow with their number.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Silence:
    """A rank without a sign of life: its number, the seconds, its host and process where it ever gave one, and its last place."""

    rank: int
    seconds: float
    host: str
    process: int
    place: str

    def sentence(self) -> str:
        """`rank 1 (node-7, process 4711) has given no sign of life for 63 s; its last place was step 12`."""
        return (
            f"rank {self.rank} ({self.host}, process {self.process}) has given no sign of life for {self.seconds:.0f} s; "
            f"its last place was {self.place}"
        )


class SilenceRule:
    """Says once when a sign has not changed for `named_after` seconds, and once more after `killed_after`, by a clock that is handed in."""

    def __init__(self, named_after: float, killed_after: float, clock: Callable[[], float]) -> None:
        self.named_after, self.killed_after, self.clock = named_after, killed_after, clock
        self._sign: str | None = None
        self._since = self._looked = clock()
        self._said = 0  # 1: named, 2: to be killed

    def look(self, sign: str | None) -> tuple[float, bool] | None:
        """(seconds of silence, True if the rank is to be killed), for the present sign; None where there is nothing new to say.

        A rank that has given no sign yet, or has said that it ends, is not silent.
        """
        now = self.clock()
        asleep = (
            now - self._looked > self.named_after / 2
        )  # this process was stopped itself: it knows nothing of that time
        self._looked = now
        if sign != self._sign or not sign or asleep:
            self._sign, self._since, self._said = sign, now, 0
            return None
        seconds = now - self._since
        level = 2 if seconds > self.killed_after else 1 if seconds > self.named_after else 0
        if level <= self._said:
            return None
        self._said = level
        return seconds, level == 2


class Heartbeats:
    """The signs of one process in a store, and its look at the next rank. Not for several threads."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        process: int,
        named_after: float,
        killed_after: float,
        clock: Callable[[], float],
    ) -> None:
        self.store, self.rank, self.process = store, rank, process
        self.next = (rank + 1) % world
        self.host = socket.gethostname()
        self.rule = SilenceRule(named_after, killed_after, clock)
        self._count = 0

    def beat(self, place: str) -> None:
        """Give a sign of life."""
        self._count += 1
        self.store.set(f"alive/{self.rank}", json.dumps([self._count, self.host, self.process, place]))

    def end(self) -> None:
        """Say that no sign will follow."""
        self.store.set(f"alive/{self.rank}", "")

    def look(self) -> tuple[Silence, bool] | None:
        """The silence of the next rank, and True if it is to be killed; None where there is nothing new to say."""
        key = f"alive/{self.next}"
        sign = self.store.get(key).decode() if self.store.check([key]) else None
        verdict = self.rule.look(sign)
        if verdict is None or not sign:
            return None
        _, host, process, place = json.loads(sign)
        return Silence(self.next, verdict[0], host, process, place), verdict[1]
