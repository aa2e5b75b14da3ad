"""Sides that are compared step by step: each in a process of its own, taking a step on request, so that all meet the same machine."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from mmspeed.errors import UserError
from mmspeed.log import ProgressLine


class Pace:
    """Lets a side take its steps when it is asked to; a step is all that happens between two calls of `step`."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.begun: float | None = None

    def step(self, *figures: Any) -> None:
        """End a step, of which (seconds, figures) are told, and wait for the next one."""
        if self.begun is not None:
            self.pipe.send((time.perf_counter() - self.begun, *figures))
        self.pipe.send("ready")
        self.pipe.recv()
        self.begun = time.perf_counter()


def in_turns(
    sides: Mapping[str, Callable[..., None]], arguments: tuple[Any, ...], rounds: int, warm: int
) -> dict[str, list[Any]]:
    """(seconds, figures) of each side's steps after `warm`; sides are called with a pipe and `arguments`, their order turns round by round.

    Raises UserError where a side ends, or takes no step within 20 minutes.
    """
    context = multiprocessing.get_context("spawn")
    started = {}
    for name, side in sides.items():
        here, far = context.Pipe()
        process = context.Process(target=side, args=(far, *arguments), daemon=True)
        process.start()
        far.close()
        started[name] = here, process
    told: dict[str, list[Any]] = {name: [] for name in sides}
    with ProgressLine("steps in turns", warm + rounds, "round") as line:
        for number in range(warm + rounds):
            turn = number % len(sides)
            for name in [*sides][turn:] + [*sides][:turn]:
                pipe = started[name][0]
                try:
                    if not pipe.poll(1200):
                        raise UserError(f"{name} took no step within 20 minutes")
                    pipe.recv()  # it is ready
                    pipe.send("go")
                    figures = pipe.recv()
                except EOFError:
                    raise UserError(f"{name} ended; its error is above") from None
                if number >= warm:
                    told[name].append(figures)
            line.advance()
    for pipe, process in started.values():
        process.kill()  # it waits for the next step
        process.join()
        pipe.close()
    return told
