"""Two passes that take turns: what is raised in one of them, and what that does to the other."""

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

from mmspeed.comm import Ledger
from mmspeed.parallel.turns import Turns

EXCHANGES = 3
Pass = Callable[[Callable[[], None]], None]  # gets what it calls where it would wait


def turns(ahead: int) -> Callable[[Pass, Pass], None]:
    """A function that runs pairs on turns of its own."""
    made = Turns(Ledger(), torch.device("cpu"), lambda: None, ahead)

    def exchange() -> None:
        assert made.ledger.gives_way is not None
        made.ledger.gives_way()

    return lambda forward, backward: made.both(lambda: forward(exchange), lambda: backward(exchange))


def run(reached: list[int], fails: Callable[[], object] = lambda: None, at: int = 0) -> Pass:
    """A pass that notes where it is, and may fail somewhere."""

    def run(exchange: Callable[[], None]) -> None:
        for place in range(EXCHANGES + 1):
            reached.append(place)
            if place == at:
                fails()
            exchange()

    return run


def raiser(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("told")

    return fail


@pytest.mark.parametrize("ahead", [-2, -1, 0, 2])
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_pass_that_fails_ends_the_other_and_is_told_alone(ahead: int, kind: type[BaseException]) -> None:
    before, both = threading.active_count(), turns(ahead)
    for at in range(EXCHANGES + 1):
        for failing in range(2):
            reached: list[list[int]] = [[], []]
            sides = [run(reached[side], raiser(kind) if side == failing else int, at) for side in range(2)]
            with pytest.raises(kind, match="told") as caught:
                both(*sides)
            assert caught.value.__cause__ is caught.value.__context__ is None
            assert reached[failing][-1] == at and len(reached[1 - failing]) <= at + 3
            whole: list[int] = []
            both(run(whole), run(whole))
            assert len(whole) == 2 * (EXCHANGES + 1)
    del both, sides, caught
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_ctrl_c_ends_the_pass_that_has_the_turn_at_its_next_exchange() -> None:
    """It comes to the forward pass, which waits."""
    reached: list[int] = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        turns(0)(run([]), run(reached, interrupt))
    assert reached == [0]
    turns(0)(run(reached), run(reached))


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
