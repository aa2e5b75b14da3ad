"""When the passes of a pipeline's step begin and end on this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmspeed.plan.measured_pipeline import Pass
from mmspeed.plan.schedules import Kind

from .marks import Marks


class Passes:
    """The passes of one step, and this process's own work between them. Nothing is read before `read`."""

    def __init__(self, mark: Marks) -> None:
        self._mark = mark
        self._begun, self._ended = mark(), None
        self._spans: list[tuple[tuple[Kind, int, int] | None, Any, Any]] = []

    @contextmanager
    def timing(self, kind: Kind, stage: int, batch: int) -> Iterator[None]:
        """Time what is inside as a pass."""
        mark = self._mark()
        yield
        self._spans.append(((kind, stage, batch), mark, self._mark()))

    @contextmanager
    def own(self) -> Iterator[None]:
        """Time what is inside as own work before the next pass."""
        mark = self._mark()
        yield
        self._spans.append((None, mark, self._mark()))

    def finish(self) -> None:
        """End the step."""
        self._ended = self._mark()

    def read(self) -> tuple[list[Pass], float]:
        """The passes, in order, and the seconds of the step."""
        seconds, own = self._mark.seconds, 0.0
        length, passes = seconds(self._begun, self._ended), list[Pass]()
        for what, mark, later in self._spans:
            if what is None:
                own += seconds(mark, later)
            else:
                passes.append(Pass(*what, seconds(self._begun, mark), seconds(self._begun, later), own))
                own = 0.0
        return passes, length
