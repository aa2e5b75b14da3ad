"""When the passes of a pipeline's step, and their exchanges, begin and end on this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmspeed.plan.measured_pipeline import MeasuredNode, Pass
from mmspeed.plan.schedules import Kind

from .marks import Marks


class Passes:
    """The passes of one step, and this process's own work between them. Nothing is read before `read`."""

    def __init__(self, mark: Marks) -> None:
        self.now = mark
        self._begun, self._ended = mark(), None
        self._spans: list[tuple[tuple[Kind, int, int] | None, Any, Any, list[Any]]] = []
        self._exchanges: dict[int, list[Any]] = {}  # of the pass that runs, by thread

    @contextmanager
    def timing(self, kind: Kind, stage: int, batch: int) -> Iterator[None]:
        """Time what is inside as a pass."""
        mark, thread = self.now(), threading.get_ident()
        exchanges = self._exchanges[thread] = []
        yield
        del self._exchanges[thread]
        self._spans.append(((kind, stage, batch), mark, self.now(), exchanges))

    def exchanged(self, place: str | None, marks: Sequence[Any]) -> None:
        """Note an exchange of this thread's pass. marks: when its node was computed, its pass was on again, had filled the time, and had what came."""
        if (exchanges := self._exchanges.get(threading.get_ident())) is not None:
            exchanges.append((place, marks))

    @contextmanager
    def own(self) -> Iterator[None]:
        """Time what is inside as own work before the next pass."""
        mark = self.now()
        yield
        self._spans.append((None, mark, self.now(), []))

    def finish(self) -> None:
        """End the step."""
        self._ended = self.now()

    def read(self) -> tuple[list[Pass], float]:
        """The passes, in order, and the seconds of the step."""
        seconds, own = self.now.seconds, 0.0
        length, passes = seconds(self._begun, self._ended), list[Pass]()
        for what, mark, later, exchanges in self._spans:
            if what is None:
                own += seconds(mark, later)
                continue
            nodes, since = list[MeasuredNode](), mark
            for place, (computed, again, filled, came) in exchanges:
                nodes.append(
                    MeasuredNode(seconds(since, computed), seconds(again, filled), seconds(filled, came), place)
                )
                since = came
            nodes.append(MeasuredNode(seconds(since, later)))
            passes.append(Pass(*what, seconds(self._begun, mark), seconds(self._begun, later), own, nodes))
            own = 0.0
        return passes, length
