"""Two passes that take turns: the forward pass of one micro-batch and the backward pass of another, each giving way where it would wait.

A pass runs from one exchange to the next: these stretches are the nodes of DualPipe (DeepSeek-AI 2024), found where exchanges are, so that no
model is cut. While the messages of one pass travel, the other computes; weights' gradients that the backward pass left fill what remains.
Only one of both runs at any time, with generators of its own, and all processes switch at the same places, so that exchanges are issued in
the same order everywhere.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import copy_context
from queue import SimpleQueue

import torch

from mmspeed.plan.overlap import BACKWARD, FORWARD, Order


class _EndedError(BaseException):
    """Ends a pass whose other one has failed."""


class Turns:
    """Runs pairs of passes on one process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turn = threading.Condition()
        self._now, self._ended = FORWARD, [True, True]
        self._order: Iterator[int] = iter(())
        self._errors: list[BaseException] = []  # of this pair, the cause first
        self._draws: list[Callable[[], None]] = []  # what the generators of each pass are set to
        self._runs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Python does not wait for it at its end: an exchange with a process that is gone may last
        threading.Thread(target=_run_each, args=(self._runs,), name="backward", daemon=True).start()
        weakref.finalize(self, self._runs.put, None)

    def both(self, forward: Callable[[], None], backward: Callable[[], None], order: Order | None = None) -> None:
        """Run a pair. Raises what one of them raises, once the other has ended.

        order: by node, the side that computes its next one; None: sides alternate. The backward pass comes first, since it begins with an
        exchange. A side whose other one has ended goes on by itself.
        """
        self._order = iter(order) if order else itertools.cycle((BACKWARD, FORWARD))
        self._now, self._ended, self._errors = next(self._order), [False, False], []
        context, self._draws = copy_context(), [_generators(self.device)] * 2
        self._runs.put(lambda: context.run(self._side, BACKWARD, backward))
        self._side(FORWARD, forward)
        with self._turn:
            self._turn.wait_for(lambda: all(self._ended))
        self._draws[FORWARD]()
        if self._errors:
            del self._errors[1:]  # it holds tensors
            raise self._errors.pop()

    def give(self) -> int | None:
        """Let the other pass of a pair go on up to its own exchange, where it is its turn.

        Returns the side that gives way; None where no pair runs.
        """
        if all(self._ended):
            return None
        if self._errors:
            raise _EndedError
        side = self._now
        turn = next(self._order, side)
        if turn != side and not self._ended[turn]:
            draws = _generators(self.device)
            with self._turn:
                self._now = turn
                self._turn.notify_all()
            self._wait(side)
            draws()
        return side

    def _side(self, side: int, run: Callable[[], None]) -> None:
        try:
            if side == BACKWARD and self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device)  # each thread has its own
            self._wait(side)
            self._draws[side]()
            run()
            self._draws[side] = _generators(self.device)
        except BaseException as error:
            self._errors.append(error)
        finally:
            with self._turn:
                self._ended[side], self._now = True, 1 - side
                self._turn.notify_all()

    def _wait(self, side: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._now == side or self._ended[1 - side])
        if self._errors:
            raise _EndedError


def _generators(device: torch.device) -> Callable[[], None]:
    """A function that sets the states of torch's generators to those of now: a backward pass may set them, to draw again as a region drew."""
    of_host, module = torch.get_rng_state(), None if device.type == "cpu" else torch.get_device_module(device)
    own = None if module is None else module.get_rng_state(device)

    def restore() -> None:
        torch.set_rng_state(of_host)
        if module is not None:
            module.set_rng_state(own, device)

    return restore


def _run_each(runs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := runs.get()) is not None:
        run()
        del run  # it holds the turns
