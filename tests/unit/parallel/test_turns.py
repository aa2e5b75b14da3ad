"""Two passes that take turns: the order of their nodes, what is raised in one of them and what that does to the other, and what they draw."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmspeed.parallel.turns import Turns
from mmspeed.plan.overlap import BACKWARD, FORWARD, Order

EXCHANGES = 3


class Exchanging(Turns):
    """Turns of passes whose exchanges take no time, in an order."""

    def __init__(self, order: str = "") -> None:
        super().__init__(torch.device("cpu"))
        self.order: Order | None = tuple(map("FB".index, order)) or None

    def both(self, forward: Callable[[], None], backward: Callable[[], None], order: Order | None = None) -> None:
        super().both(forward, backward, order or self.order)

    def run(self, reached: list[int], at: int = 0, fails: Callable[[], object] = int) -> Callable[[], None]:
        """A pass that notes where it is, and may fail somewhere."""

        def run() -> None:
            for place in range(EXCHANGES + 1):
                reached.append(place)
                if place == at:
                    fails()
                self.give()

        return run


def nodes_run(turns: Turns, counts: tuple[int, int], order: Order | None, fails: tuple[int, int] | None = None) -> str:
    """The nodes of a pair in the order in which they ran: passes of so many nodes, with an exchange behind each but the last."""
    ran: list[str] = []

    def side(number: int) -> Callable[[], None]:
        def run() -> None:
            for place in range(counts[number]):
                ran.append("FB"[number])
                if (number, place) == fails:
                    raise ValueError(f"node {place}")
                if place < counts[number] - 1:
                    assert turns.give() == number

        return run

    turns.both(side(FORWARD), side(BACKWARD), order)
    return "".join(ran)


@pytest.mark.parametrize(
    "counts, order, ran",
    [
        ((3, 3), None, "BFBFBF"),
        ((2, 4), None, "BFBFBB"),
        ((2, 4), "BBBFBF", "BBBFBF"),
        ((3, 3), "FFBBFB", "FFBBFB"),
        ((3, 3), "FFFBBB", "FFFBBB"),
        ((3, 2), "BFBF", "BFBFF"),  # more nodes than the order knows
        ((2, 2), "BBBBFF", "BBFF"),  # fewer
        ((1, 1), None, "BF"),
    ],
)
def test_nodes_run_in_order(counts: tuple[int, int], order: str | None, ran: str) -> None:
    turns = Turns(torch.device("cpu"))
    for _ in range(3):
        assert nodes_run(turns, counts, None if order is None else tuple(map("FB".index, order))) == ran
    assert turns.give() is None  # no pair runs


def raiser(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("told")

    return fail


ORDERS = pytest.mark.parametrize("order", ["", "BBFBFB", "FBFBFBFB", "FFBBFFBB"])


@ORDERS
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_pass_that_fails_ends_the_other_and_is_told_alone(order: str, kind: type[BaseException]) -> None:
    before, turns = threading.active_count(), Exchanging(order)
    for at in range(EXCHANGES + 1):
        for failing in range(2):
            reached: list[list[int]] = [[], []]
            sides = [turns.run(reached[side], at, raiser(kind) if side == failing else int) for side in range(2)]
            with pytest.raises(kind, match="told") as caught:
                turns.both(*sides)
            assert caught.value.__cause__ is caught.value.__context__ is None
            assert reached[failing][-1] == at and len(reached[1 - failing]) <= at + 3
            whole: list[int] = []
            turns.both(turns.run(whole), turns.run(whole))
            assert len(whole) == 2 * (EXCHANGES + 1)
    del turns, sides, caught
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.001)
    assert threading.active_count() <= before  # the threads of earlier turns may end meanwhile


def test_ctrl_c_ends_the_pass_that_has_the_turn_at_its_next_exchange() -> None:
    """It comes to the forward pass, which waits."""
    turns, reached = Exchanging(), list[int]()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        turns.both(turns.run([]), turns.run(reached, 0, interrupt))
    assert reached == [0]
    turns.both(turns.run(reached), turns.run(reached))


def drawn(order: str | None) -> list[Tensor]:
    """What a forward pass draws beside a backward pass that draws again, what is drawn behind both, and the gradients; None: one by one.

    As with `memory.exchange_again`, the backward pass makes exchanges of a recomputed region again, in the midst of its dropouts.
    """
    torch.manual_seed(0)
    turns, draws, x = Exchanging(order or ""), list[Tensor](), torch.ones(50, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        for _ in range(EXCHANGES):
            x = F.dropout(x.sin())
            turns.give()
        return x.sin()

    def forward() -> None:
        for _ in range(EXCHANGES):
            draws.append(torch.rand(2))
            turns.give()

    loss = checkpoint(region, x, use_reentrant=False).sum()
    if order is None:
        forward()
        loss.backward()
    else:
        turns.both(forward, loss.backward)
    assert x.grad is not None
    return [*draws, torch.rand(2), x.grad]


@ORDERS
def test_each_pass_draws_what_it_draws_alone(order: str) -> None:
    assert all(map(torch.equal, drawn(order), drawn(None)))


STUCK = """
import os, signal, threading, time, torch
from mmspeed.parallel.turns import Turns

def waits():
    for seconds in (0.2, 0.4):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(1000)

Turns(torch.device("cpu")).both(int, waits)
"""


@pytest.mark.slow
def test_python_ends_at_a_second_ctrl_c_while_a_pass_is_stuck_in_an_exchange() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stderr.endswith("KeyboardInterrupt\n")
