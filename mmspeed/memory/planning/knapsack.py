"""Choose one option for each block so that a step fits into memory and adds least time: exact, by dynamic programming.

A multiple-choice knapsack whose constraint holds at every block rather than at the end: while block b computes, backward needs what blocks
0..b keep, what b itself takes meanwhile, and the gradients that later blocks have left.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Option:
    """A way to run a block, with its costs. Bytes and seconds are of one micro-batch.

    Args:
        kept: bytes from its forward to its backward.
        forward, backward: bytes above `kept` at the peak of either.
        host: bytes in the host's memory from its forward to its backward.
        seconds: that it adds to the plain block.
        ways: the way of each of its spans.
        waits: bytes kept behind its backward, where the gradients of weights wait.
    """

    kept: int
    forward: int = 0
    backward: int = 0
    host: int = 0
    seconds: float = 0.0
    ways: Mapping[str, str] = field(default_factory=dict)
    waits: int = 0


Blocks = Sequence[Sequence[Option]]
InFlight = Sequence[float] | float


def choose(
    blocks: Blocks,
    room: int,
    in_flight: InFlight = 1,
    *,
    gradients: Sequence[int] | None = None,
    host_room: int | None = None,
    unit: int = 1,
) -> list[int] | None:
    """The options, one for each block, that together add least time within `room` bytes; None where nothing fits.

    Among equal times, the choice that keeps fewer bytes. Times count in whole nanoseconds.

    Args:
        blocks: the options of each block, in the order of the forward pass.
        in_flight: micro-batches of which a block keeps something at a time, one number or one for each block: factors of `kept`, `host`.
        gradients: for each block, bytes of the gradients that later blocks have left when it computes its backward.
        host_room: bytes of the host's memory.
        unit: bytes are rounded up to multiples of it, which bounds the work: the answer is exact in these units, and never over the room.

    Raises ValueError where a block has no option, or the numbers do not match the blocks.
    """
    table = _OptionTable(blocks, in_flight, gradients, unit)
    levels = _levels(table, room // unit, None)
    if levels is None:
        return None
    chosen = _trace(levels)
    if host_room is None or table.host_of(chosen) <= host_room:
        return chosen
    levels = _levels(table, room // unit, host_room)
    return None if levels is None else _trace(levels)


def peak_of(
    blocks: Blocks, chosen: Sequence[int], in_flight: InFlight = 1, *, gradients: Sequence[int] | None = None
) -> int:
    """The peak of a choice, in bytes."""
    table = _OptionTable(blocks, in_flight, gradients, 1)
    kept = peak = 0
    for block, option in enumerate(chosen):
        kept += int(table.kept[block][option])
        peak = max(peak, kept + int(table.need[block][option]))
    return peak


def least_room(
    blocks: Blocks, in_flight: InFlight = 1, *, gradients: Sequence[int] | None = None
) -> tuple[int, list[int]]:
    """The least room in which a choice fits, in bytes, and that choice."""
    table = _OptionTable(blocks, in_flight, gradients, 1)
    low, high = 0, peak_of(blocks, [0] * len(blocks), in_flight, gradients=gradients)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(table, middle) is not None else (middle + 1, high)
    chosen = _fits(table, low)
    assert chosen is not None
    return low, chosen


def _fits(table: _OptionTable, room: int) -> list[int] | None:
    """A choice within a room; None where there is none. Keeping least up to a block leaves most to the next ones."""
    kept, chosen = 0, []
    for block, own in enumerate(table.kept):
        fitting = np.flatnonzero(kept + own + table.need[block] <= room)
        if not fitting.size:
            return None
        chosen.append(int(fitting[np.argmin(own[fitting])]))
        kept += int(own[chosen[-1]])
    return chosen


class _OptionTable:
    """The figures of all options as arrays, block by block, in units of memory and nanoseconds."""

    def __init__(self, blocks: Blocks, in_flight: InFlight, gradients: Sequence[int] | None, unit: int) -> None:
        weights = [in_flight] * len(blocks) if isinstance(in_flight, int | float) else list(in_flight)
        gradient_bytes = list(gradients) if gradients is not None else [0] * len(blocks)
        if not len(weights) == len(gradient_bytes) == len(blocks) or not all(blocks):
            raise ValueError("every block needs an option, a number of micro-batches in flight and bytes of gradients")

        def up(bytes_: float) -> int:
            return math.ceil(bytes_ / unit) if unit > 1 else math.ceil(bytes_)

        self.kept, self.need, self.host, self.time = [], [], [], []
        for options, weight, left in zip(blocks, weights, gradient_bytes, strict=True):
            self.kept.append(np.array([up(option.kept * weight) for option in options], np.int64))
            # in forward too: with accumulation the gradients of the previous micro-batch exist
            self.need.append(np.array([up(max(o.forward, o.backward) + left) for o in options], np.int64))
            self.host.append(np.array([math.ceil(option.host * weight) for option in options], np.int64))
            self.time.append(np.array([round(option.seconds * 1e9) for option in options], np.int64))

    def host_of(self, chosen: Sequence[int]) -> int:
        return sum(int(own[option]) for own, option in zip(self.host, chosen, strict=True))


@dataclass
class _Level:
    """The points reachable after a block, without those that another point beats in bytes, host bytes and time."""

    kept: np.ndarray
    host: np.ndarray
    time: np.ndarray
    before: np.ndarray  # the point of the previous block
    option: np.ndarray


def _levels(table: _OptionTable, room: int, host_room: int | None) -> list[_Level] | None:
    """The points after each block; None where there are none. Without `host_room` the host's bytes do not count."""
    zero = np.zeros(1, np.int64)
    level = _Level(zero, zero, zero, zero, zero)
    levels = []
    for block, own in enumerate(table.kept):
        kept = level.kept[:, None] + own
        host = level.host[:, None] + (table.host[block] if host_room is not None else 0 * own)
        fits = kept + table.need[block] <= room
        if host_room is not None:
            fits &= host <= host_room
        before, option = np.nonzero(fits)
        if not before.size:
            return None
        time = (level.time[:, None] + table.time[block])[fits]
        level = _best(_Level(kept[fits], host[fits], time, before, option), host_room is not None)
        levels.append(level)
    return levels


def _best(level: _Level, with_host: bool) -> _Level:
    """The points that no other equals or beats in everything."""
    order = np.lexsort((level.host, level.time, level.kept))
    host, time = level.host[order], level.time[order]
    if with_host:
        order = order[_staircase(host, time)]
    else:  # of more bytes, only what is faster than all with fewer
        fastest = np.minimum.accumulate(time)
        order = order[np.concatenate(([True], fastest[1:] < fastest[:-1]))]
    return _Level(*(values[order] for values in (level.kept, level.host, level.time, level.before, level.option)))


def _staircase(host: np.ndarray, time: np.ndarray) -> list[int]:
    """The points, by rising bytes, that no earlier one equals or beats in both host bytes and time."""
    taken: list[int] = []
    steps: list[
        tuple[int, int]
    ] = []  # (host, time) of taken points that no other taken point beats: time falls as host rises
    for place, point in enumerate(zip(host.tolist(), time.tolist(), strict=True)):
        at = bisect_right(steps, (point[0], math.inf))
        if at and steps[at - 1][1] <= point[1]:
            continue
        taken.append(place)
        while at < len(steps) and steps[at][1] >= point[1]:
            del steps[at]
        if at and steps[at - 1][0] == point[0]:
            del steps[at - 1]
        insort(steps, point)
    return taken


def _trace(levels: list[_Level]) -> list[int]:
    """The options that lead to the fastest point of the last block."""
    last = levels[-1]
    point = int(np.lexsort((last.kept, last.time))[0])
    chosen = []
    for level in reversed(levels):
        chosen.append(int(level.option[point]))
        point = int(level.before[point])
    return chosen[::-1]
