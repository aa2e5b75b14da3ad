"""Agreement of ranks on their attempt, over a real store of torch, with processes of former attempts that left or come late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mmspeed import rendezvous
from mmspeed.errors import UserError
from mmspeed.rendezvous import agree, is_lost_connection, newest_arrivals


@pytest.fixture
def connect() -> Iterator[Callable[[], dist.TCPStore]]:
    """Connections to one store, as the launcher's."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that look for a newer offer at once."""
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.1)


def start(
    pool: ThreadPoolExecutor,
    connect: Callable[[], dist.TCPStore],
    rank: int,
    world: int,
    name: str,
    seconds: float = 20,
) -> Future[str]:
    return pool.submit(agree, connect(), rank, world, seconds, name)


def arrived(store: dist.TCPStore, rank: int, name: str) -> None:
    """Wait until a process has announced itself as a rank of two."""
    end = time.monotonic() + 20
    while newest_arrivals(store.get(rendezvous.ARRIVALS), 2).get(rank) != name:
        assert time.monotonic() < end, f"{name} has not come"
        time.sleep(0.01)


def test_ranks_of_an_attempt_that_was_killed_before_it_met_do_not_count(connect: Callable[[], dist.TCPStore]) -> None:
    dead = connect()
    for rank, name in ((1, "dead1"), (2, "dead2")):
        dead.append(rendezvous.ARRIVALS, f"{rank}/3/{name}\n")
    with ThreadPoolExecutor(3) as pool:
        first = start(pool, connect, 0, 3, "b0")
        with pytest.raises(TimeoutError):
            first.result(timeout=0.5)  # it waits for living ranks
        others = [start(pool, connect, rank, 3, f"b{rank}") for rank in (1, 2)]
        assert [one.result() for one in (first, *others)] == ["b0"] * 3


def test_an_attempt_of_another_size_meets_on_the_same_store(connect: Callable[[], dist.TCPStore]) -> None:
    with ThreadPoolExecutor(3) as pool:
        three = [start(pool, connect, rank, 3, f"c{rank}") for rank in range(3)]
        assert {rank.result() for rank in three} == {"c0"}
        two = [start(pool, connect, rank, 2, f"d{rank}") for rank in range(2)]
        assert {rank.result() for rank in two} == {"d0"}


def test_a_delayed_rank_of_the_former_attempt_ends_and_its_messages_do_not_arrive(
    connect: Callable[[], dist.TCPStore],
) -> None:
    with ThreadPoolExecutor(3) as pool:
        old = [start(pool, connect, rank, 2, f"old{rank}") for rank in range(2)]
        assert {rank.result() for rank in old} == {"old0"}
        delayed = start(pool, connect, 1, 2, "delayed", 5.0)  # it came after the attempt it belongs to had begun
        arrived(connect(), 1, "delayed")
        new = [start(pool, connect, 1, 2, "new1")]
        arrived(connect(), 1, "new1")
        new.append(start(pool, connect, 0, 2, "new0"))
        assert {rank.result() for rank in new} == {"new0"}
        with pytest.raises(UserError, match="rank 1 belongs to an attempt that is over"):
            delayed.result()
    late, present = (dist.PrefixStore(f"mmspeed/attempt/{name}", connect()) for name in ("old0", "new0"))
    late.set("address of rank 1", "a port that nobody listens on")
    assert not present.check(["address of rank 1"])


def test_two_attempts_exchange_on_one_store(connect: Callable[[], dist.TCPStore]) -> None:
    # gloo's groups, one after the other, which without names of attempts read each other's addresses
    def exchange(rank: int, name: str) -> int:
        store = connect()
        apart = dist.PrefixStore(f"mmspeed/attempt/{agree(store, rank, 2, 20, name)}", store)
        apart.set(str(rank), name)
        return len(apart.get(str(1 - rank)))

    with ThreadPoolExecutor(2) as pool:
        for attempt in ("e", "longer"):
            sizes = list(pool.map(exchange, range(2), [f"{attempt}{rank}" for rank in range(2)]))
            assert sizes == [len(attempt) + 1] * 2


def test_a_rank_that_meets_nobody_says_so(connect: Callable[[], dist.TCPStore]) -> None:
    with pytest.raises(UserError, match="rank 0 of 2 has not met the others within 0 s"):
        agree(connect(), 0, 2, 0.2, "alone")


def test_the_log_of_arrivals() -> None:
    log = b"0/2/a\n1/2/b\n0/3/c\n1/2/d\n"
    assert newest_arrivals(log, 2) == {0: "a", 1: "d"}
    assert newest_arrivals(log, 3) == {0: "c"}
    assert newest_arrivals(b"", 1) == {}


def test_a_lost_connection_is_known_by_what_backends_say() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:12172")
    assert is_lost_connection(gloo) and is_lost_connection(dist.DistStoreError("timeout"))
    assert not is_lost_connection(RuntimeError("shapes do not fit")) and not is_lost_connection(
        ValueError("broken pipe")
    )
