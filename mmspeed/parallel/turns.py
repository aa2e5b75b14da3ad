"""Two passes that take turns: the forward pass of one micro-batch and the backward pass of another, each giving way where it would wait.

A pass runs from one exchange to the next: these stretches are the nodes of DualPipe (DeepSeek-AI 2024), found where exchanges are, so that no
model is cut. While the messages of one pass travel, the other computes; weights' gradients that the backward pass left fill what remains.
Only one of both runs at any time, and all processes switch at the same places, so that exchanges are issued in the same order everywhere.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import torch

from mmspeed.plan.overlap import BACKWARD, FORWARD, Order


class _EndedError(BaseException):
    """Ends a pass whose other one has failed."""


class Turns:
    """Runs pairs of passes on one process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, "backward")
        self._turn = threading.Condition()
        self._now, self._ended, self._failed = FORWARD, [True, True], False
        self._order: Iterator[int] = iter(())

    def both(self, forward: Callable[[], None], backward: Callable[[], None], order: Order | None = None) -> None:
        """Run a pair. Raises what one of them raises, once the other has ended.

        order: by node, the side that computes its next one; None: sides alternate. The backward pass comes first, since it begins with an
        exchange. A side whose other one has ended goes on by itself.
        """
        self._order = iter(order) if order else itertools.cycle((BACKWARD, FORWARD))
        self._now, self._ended, self._failed = next(self._order), [False, False], False
        context = copy_context()
        other: Future[None] = self._thread.submit(context.run, self._side, BACKWARD, backward)
        error = _error_of(lambda: self._side(FORWARD, forward))
        errors = [error, _error_of(other.result)]
        for error in sorted(filter(None, errors), key=lambda each: isinstance(each, _EndedError)):
            raise error

    def give(self) -> int | None:
        """Let the other pass of a pair go on up to its own exchange, where it is its turn.

        Returns the side that gives way; None where no pair runs.
        """
        if all(self._ended):
            return None
        side = self._now
        turn = next(self._order, side)
        if turn != side and not self._ended[turn]:
            with self._turn:
                self._now = turn
                self._turn.notify_all()
            self._wait(side)
        return side

    def _side(self, side: int, run: Callable[[], None]) -> None:
        if side == BACKWARD and self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)  # each thread has its own
        try:
            self._wait(side)
            run()
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._turn:
                self._ended[side], self._now = True, 1 - side
                self._turn.notify_all()

    def _wait(self, side: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._now == side or self._ended[1 - side])
        if self._failed:
            raise _EndedError


def _error_of(run: Callable[[], None]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None
