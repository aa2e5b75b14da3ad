"""Two passes that take turns: what is raised in one of them and what that does to the other, and what they draw."""

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

from mmspeed.comm import Ledger
from mmspeed.parallel.turns import Turns

EXCHANGES = 3


class Exchanging(Turns):
    """Turns of passes whose exchanges take no time."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__(Ledger(), torch.device("cpu"), lambda: None, ahead)

    def exchange(self) -> None:
        if self.ledger.gives_way is not None:
            self.ledger.gives_way()

    def run(self, reached: list[int], at: int = 0, fails: Callable[[], object] = int) -> Callable[[], None]:
        """A pass that notes where it is, and may fail somewhere."""

        def run() -> None:
            for place in range(EXCHANGES + 1):
                reached.append(place)
                if place == at:
                    fails()
                self.exchange()

        return run


def raiser(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("told")

    return fail


AHEAD = pytest.mark.parametrize("ahead", [-2, -1, 0, 2])


@AHEAD
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_pass_that_fails_ends_the_other_and_is_told_alone(ahead: int, kind: type[BaseException]) -> None:
    before, turns = threading.active_count(), Exchanging(ahead)
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
    assert threading.active_count() == before


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


def drawn(ahead: int | None) -> list[Tensor]:
    """What a forward pass draws beside a backward pass that draws again, what is drawn behind both, and the gradients; None: one by one.

    As with `memory.exchange_again`, the backward pass makes exchanges of a recomputed region again, in the midst of its dropouts.
    """
    torch.manual_seed(0)
    turns, draws, x = Exchanging(ahead or 0), list[Tensor](), torch.ones(50, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        for _ in range(EXCHANGES):
            x = F.dropout(x.sin())
            turns.exchange()
        return x.sin()

    def forward() -> None:
        for _ in range(EXCHANGES):
            draws.append(torch.rand(2))
            turns.exchange()

    loss = checkpoint(region, x, use_reentrant=False).sum()
    if ahead is None:
        forward()
        loss.backward()
    else:
        turns.both(forward, loss.backward)
    assert x.grad is not None
    return [*draws, torch.rand(2), x.grad]


@AHEAD
def test_each_pass_draws_what_it_draws_alone(ahead: int) -> None:
    assert all(map(torch.equal, drawn(ahead), drawn(None)))


STUCK = """
import os, signal, threading, time, torch
from mmspeed.comm import Ledger
from mmspeed.parallel.turns import Turns

def waits():
    for seconds in (0.2, 0.4):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(1000)

Turns(Ledger(), torch.device("cpu"), int).both(int, waits)
"""


@pytest.mark.slow
def test_python_ends_at_a_second_ctrl_c_while_a_pass_is_stuck_in_an_exchange() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stderr.endswith("KeyboardInterrupt\n")
