"""The store that the processes of one attempt share, apart from those of every other attempt.

torch's elastic launcher keeps one store for all of its attempts and gives it to the workers without a prefix (`use_agent_store`), and the
workers of a restarted run then read the addresses of dead ones. Nor does the launcher say which attempt it is: its count of restarts
is its own, and those of two launchers differ after one of them lost a worker. So rank 0 gives the attempt a name, on which all its ranks
agree before they exchange anything else.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import UserError

ATTEMPT = "MMSPEED_ATTEMPT"  # the name of this process's attempt, once its ranks have agreed on it
ARRIVALS, OFFER, ACCEPTED, BEGIN = "mmspeed/arrivals", "mmspeed/offer/", "mmspeed/accepted/", "mmspeed/begin/"
LOOK_SECONDS = 5.0  # after which a rank that waits for its attempt looks for a newer offer


# parts of what backends say when a peer is gone: gloo, nccl and hccl have no exception of their own for it
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "connectfullmesh",
    "remote process exited",
    "communicator was aborted",
    "socket timeout",
    "connection refused",
)


def is_lost_connection(error: BaseException) -> bool:
    """True for an exchange that failed because another rank, or the launcher's store, is gone or silent."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST)


def restarts() -> int:
    """Restarts that this process's launcher has made; 0 without one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def attempt_store(timeout_seconds: float) -> dist.Store | None:
    """The store of this attempt where the launcher keeps one for several; None where torch's own way is right.

    A collective call of all ranks. Raises UserError where they do not meet in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = client(timeout_seconds)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ[ATTEMPT] = name = agree(store, rank, world, timeout_seconds)
    return dist.PrefixStore(f"mmspeed/attempt/{name}", store)


def client(timeout_seconds: float) -> dist.TCPStore:
    """A connection of its own to the launcher's store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


def agree(store: Any, rank: int, world: int, timeout_seconds: float, name: str | None = None) -> str:
    """The name of the attempt, the same on the `world` ranks that call this together.

    Each process announces a name of its own. Rank 0 offers its name to the newest arrival of every rank, and begins when all of these have
    accepted it; names of processes that are gone never answer. Raises UserError after `timeout_seconds`, for a process whose place a newer
    one has taken, and for one whose launcher has ended. `store` is one that can append, as a TCPStore. `name`: this process's; by default
    a random one.
    """
    own = name or uuid.uuid4().hex
    store.append(ARRIVALS, f"{rank}/{world}/{own}\n")
    deadline, launcher = time.monotonic() + timeout_seconds, os.getppid()

    def go_on() -> None:
        if newest_arrivals(store.get(ARRIVALS), world).get(rank) != own or os.getppid() != launcher:
            raise UserError(f"rank {rank} belongs to an attempt that is over: a newer process has its place")
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {rank} of {world} has not met the others within {timeout_seconds:.0f} s; see the other ranks' lines"
            )

    return _lead(store, world, own, go_on) if rank == 0 else _follow(store, rank, own, go_on)


def newest_arrivals(log: bytes, world: int) -> dict[int, str]:
    """The newest name of each rank of a world, from the log of all arrivals."""
    entries = (line.split("/") for line in log.decode().splitlines())
    return {int(rank): name for rank, size, name in entries if int(size) == world}


def _lead(store: Any, world: int, own: str, go_on: Callable[[], None]) -> str:
    offered: Mapping[int, str] = {}
    pause = 0.01
    while True:
        arrived = newest_arrivals(store.get(ARRIVALS), world)
        for rank, name in arrived.items():
            if rank and offered.get(rank) != name:
                store.set(OFFER + name, own)
        offered = arrived
        store.append(ACCEPTED + own, "")  # so that it can be read
        accepted = set(store.get(ACCEPTED + own).decode().split())
        if len(arrived) == world and accepted >= {name for rank, name in arrived.items() if rank}:
            for name in arrived.values():  # by name: a process whose place was taken may have accepted, too
                store.set(f"{BEGIN}{own}/{name}", "1")
            return own
        go_on()
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)


def _follow(store: Any, rank: int, own: str, go_on: Callable[[], None]) -> str:
    accepted = ""
    offer: str
    while True:
        if _wait(store, OFFER + own) and (offer := store.get(OFFER + own).decode()) != accepted:
            store.append(ACCEPTED + offer, f"{own}\n")
            accepted = offer
        if accepted and _wait(store, f"{BEGIN}{accepted}/{own}"):
            return accepted
        go_on()


def _wait(store: Any, key: str) -> bool:
    """True once a key is there; False after `LOOK_SECONDS`."""
    try:
        store.wait([key], timedelta(seconds=LOOK_SECONDS))
    except dist.DistStoreError:
        return False
    return True
