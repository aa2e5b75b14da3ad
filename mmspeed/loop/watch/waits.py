"""Waits of this rank for others within a step: at exchanges of experts, at those of attention, and at the end, where gradients are summed.

On CPU the time in which the thread sleeps there. On an accelerator the time for which the stream of the computation stands still, between
two events: what a message takes beyond the work that it travels beside. Nothing is read before the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.comm import WAITED_AT, Ledger
from mmspeed.device import Device
from mmspeed.parallel import tensors_of
from mmspeed.torch_internals import at_end_of_backward

from .marks import Marks

END = "end"
PLACES = (*WAITED_AT, END)


class Waits:
    """Seconds of waiting by place, of steps between `begin` and `finish`. `asleep`: seconds that this thread has slept, for the CPU."""

    def __init__(
        self, models: Sequence[nn.Module], ledger: Ledger, device: Device, asleep: Callable[[], float]
    ) -> None:
        self.ledger, self._mark = ledger, Marks(device, asleep)
        self._spans: list[tuple[str, Any, Any]] = []  # (place, mark, later mark)
        self._seconds = dict.fromkeys(PLACES, 0.0)
        self._expected, self._summed = False, None
        # before the engine's own hooks, so that what is called at the end of a backward comes before its sums
        self._hooks = [model.register_forward_hook(self._expect, prepend=True) for model in models]

    def close(self) -> None:
        """Take the hooks off the models."""
        self.ledger.waiting = None
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begin a step."""
        self._expected, self._summed, self._spans = False, None, []
        self.ledger.waiting = self.waiting

    def finish(self) -> None:
        """Add up a step that is over."""
        self.ledger.waiting = None
        if self._summed is not None and not self._mark.by_events:  # what ranks agree on after it
            self._spans.append((END, self._summed, self._mark()))
        for place, mark, later in reversed(self._spans):  # the last one first, which all others come before
            self._seconds[place] += max(0.0, self._mark.seconds(mark, later))

    def read(self) -> dict[str, float]:
        """Seconds at each of `PLACES` since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PLACES, 0.0)
        return seconds

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Time what is inside as a wait at a place."""
        mark = self._mark()
        yield
        self._spans.append((place, mark, self._mark()))

    def _expect(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        if not self._expected:
            self._expected = True
            at_end_of_backward(self._gradients_made)

    def _gradients_made(self) -> None:
        self._expected, made = False, self._mark()

        def summed() -> None:
            self._summed = self._mark()
            self._spans.append((END, made, self._summed))

        at_end_of_backward(summed)  # once more, behind what the engine has queued
