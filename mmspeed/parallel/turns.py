"""Two passes that take turns: the forward pass of one micro-batch and the backward pass of another, each giving way where it would wait.

A pass runs from one exchange to the next: these stretches are the nodes of DualPipe (DeepSeek-AI 2024), found where exchanges are, so that no
model is cut. While the messages of one pass travel, the other computes; weights' gradients that the backward pass left fill what remains.
Only one of both runs at any time, and all processes switch at the same places, so that exchanges are issued in the same order everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import torch

from mmspeed.comm import Ledger

FORWARD, BACKWARD = 0, 1


class _EndedError(BaseException):
    """Ends a pass whose other one has failed."""


class Turns:
    """Runs pairs of passes on one process.

    ledger: of the axes whose exchanges give way. fill: called in the backward pass before it waits. ahead: nodes that the forward pass
    computes before the backward pass begins; negative: the other way round. A backward pass begins with an exchange, so it comes first.
    """

    def __init__(self, ledger: Ledger, device: torch.device, fill: Callable[[], None], ahead: int = -1) -> None:
        self.ledger, self.device, self.fill, self.ahead = ledger, device, fill, ahead
        self._thread = ThreadPoolExecutor(1, "backward")
        self._turn = threading.Condition()
        self._now, self._lead, self._ended, self._failed = FORWARD, 0, [True, True], False

    def both(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run a pair. Raises what one of them raises, once the other has ended."""
        first = FORWARD if self.ahead >= 0 else BACKWARD
        self._now, self._lead, self._ended, self._failed = first, max(1, abs(self.ahead)) - 1, [False, False], False
        before, self.ledger.gives_way = self.ledger.gives_way, self._give
        try:
            context = copy_context()
            other: Future[None] = self._thread.submit(context.run, self._side, BACKWARD, backward)
            error = _error_of(lambda: self._side(FORWARD, forward))
            errors = [error, _error_of(other.result)]
        finally:
            self.ledger.gives_way = before
        for error in sorted(filter(None, errors), key=lambda each: isinstance(each, _EndedError)):
            raise error

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

    def _give(self) -> None:
        """Let the other pass go on up to its own exchange."""
        side = self._now
        if self._lead > 0:
            self._lead -= 1
        elif not self._ended[1 - side]:
            with self._turn:
                self._now = 1 - side
                self._turn.notify_all()
            self._wait(side)
        if side == BACKWARD:
            self.fill()

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
