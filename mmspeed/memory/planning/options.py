"""What options a block has, and the model of a step's memory that a choice among them goes by. Nothing here computes a model.

A step's memory is what is there between steps, what lies outside of the blocks, and what blocks keep and take; see `StepFigures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast

from mmspeed.config.memory import ActivationPolicy, MemoryConfig, parse_bytes
from mmspeed.memory.recompute.regions import ActivationPolicies

from .knapsack import Option, choose, least_room, peak_of

BRANCHES = ("attention", "cross_attention", "mlp")
SMALL: ActivationPolicies = {"norm": "recompute", "activation": "recompute"}
WAYS: tuple[ActivationPolicy, ...] = ("recompute", "selective", "offload_selective", "offload")
UNITS = 1 << 14  # of the room, that bytes are rounded up to where an exact choice would be long in coming

# -- what a block can do -----------------------------------------------------------------------------------------------


def offloads(ways: Mapping[str, str]) -> bool:
    """Whether anything goes to the host."""
    return any(way.startswith("offload") for way in ways.values())


def single_policies(spans: Sequence[str], with_swap: bool) -> list[ActivationPolicies]:
    """Each way of each span alone, saving everything first: what is measured of a block that names these spans."""
    each = [way for way in WAYS if with_swap or not way.startswith("offload")]
    found: list[ActivationPolicies] = [{}, *({"block": way} for way in each)]
    found += [{span: way} for span in BRANCHES if span in spans for way in each]
    if all(span in spans for span in SMALL):
        found.append(SMALL)
    return found


def combinations(singles: Sequence[Option]) -> list[Option]:
    """All options of a block, from what each single way gives and costs alone: figures of branches add up.

    `kept`, `host` and `seconds` are right then. The peaks are not known yet, and are those of the first single.
    """
    plain = next(option for option in singles if not option.ways)
    branches: dict[str, list[Option]] = {}
    for option in singles:
        if len(option.ways) == 1 and next(iter(option.ways)) in BRANCHES:
            branches.setdefault(next(iter(option.ways)), []).append(option)
    found = [option for option in singles if not option.ways or not set(option.ways) <= set(BRANCHES)]
    for taken in product(*([plain, *own] for own in branches.values())):
        told = [option for option in taken if option.ways]
        if told:
            found.append(
                replace(
                    plain,
                    kept=plain.kept + sum(option.kept - plain.kept for option in told),
                    host=sum(option.host for option in told),
                    seconds=sum(option.seconds for option in told),
                    ways={name: way for option in told for name, way in option.ways.items()},
                )
            )
    return found


def front(options: Sequence[Option], most: int | None = None, *, peaks: bool = False) -> list[Option]:
    """Those that no other is better than, or equal to, by bytes kept and seconds (and with `peaks` by bytes at the peaks).

    `most`: so many of them, spread evenly over the bytes, the extremes among them.
    """

    def figures(option: Option) -> tuple[float, ...]:
        least = (option.kept, option.seconds)
        return (*least, option.host, option.kept + option.forward, option.kept + option.backward) if peaks else least

    left: list[Option] = []
    for option in sorted(options, key=lambda option: (*figures(option), len(option.ways))):
        own = figures(option)
        if not any(all(a <= b for a, b in zip(figures(other), own, strict=True)) for other in left):
            left.append(option)
    if most is None or len(left) <= most:
        return left
    places = {round(i * (len(left) - 1) / (most - 1)) for i in range(most)}
    return [left[place] for place in sorted(places)]


def least_bytes(options: Sequence[Option]) -> list[Option]:
    """Those that no other is better than by bytes kept and at the peak, whatever their time: what fits at all hangs on them alone."""
    left: list[Option] = []
    for option in sorted(options, key=lambda option: (option.kept, _peak(option), option.seconds)):
        if not left or _peak(option) < _peak(left[-1]):
            left.append(option)
    return left


def _peak(option: Option) -> int:
    """Bytes above `kept`, in forward or in backward."""
    return max(option.forward, option.backward)


# -- what a step takes -------------------------------------------------------------------------------------------------

STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.1, "muon": 4.5}  # a parameter; of muon about, since some have two moments


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on a device that do not depend on what is computed. `update`: what an optimizer's step takes for itself."""

    parameters: int
    master: int
    states: int
    average: int
    gradients: int
    update: int

    @property
    def between(self) -> int:
        """Between steps."""
        return self.parameters + self.master + self.states + self.average


def static_bytes(
    numbers: int, memory: MemoryConfig, *, average: bool, optimizer: str = "adamw", largest: int = 0
) -> StaticMemory:
    """What so many parameters take on a device that holds them, by formula.

    average: whether there is a moving average of them. largest: numbers of the largest parameter, which a bucket is at least of.
    """
    half = memory.master != "parameters"
    each = STATE_BYTES.get(optimizer, 8.0)
    bucket = 4 * max(largest, min(numbers, parse_bytes(memory.bucket) // 4))
    if memory.tiered:  # masters and states of a bucket and of the next one that comes, and the update itself
        update = (2 if half else 1) * bucket + (2 * int(bucket * each / 4) if memory.states == "host" else 0)
    else:  # the kernels of lists of tensors have one number for each parameter at a time
        update = 4 * numbers
    return StaticMemory(
        parameters=(2 if half else 4) * numbers,
        master={"parameters": 0, "float32": 4, "split": 2, "host": 0}[memory.master] * numbers,
        states=0 if memory.states == "host" else int(each * numbers),
        average=4 * numbers if average and memory.ema == "device" else 0,
        gradients=4 * numbers if not memory.release_gradients else min(4 * numbers, 2 * bucket),
        update=update,
    )


@dataclass(frozen=True)
class StepFigures:
    """What a step of one micro-batch takes.

    Args:
        static: between steps and in the update.
        ends: bytes that the batch and what lies before and after the blocks keep.
        tail: bytes above all that is kept, at the peak of what lies before and after the blocks.
        carried: bytes of the gradients that all blocks add to, such as those of the caption.
        kinds: the kind of each block.
        options: of each kind; the first saves everything.
        gradients: bytes of the gradients of each block.
        gradients_stay: whether all gradients are there from the start: with accumulation, and with replicas.
        keep_last: whether the last block offloads nothing.
    """

    static: StaticMemory
    ends: int
    tail: int
    kinds: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    gradients: tuple[int, ...]
    gradients_stay: bool = False
    keep_last: bool = True
    carried: int = 0
    plain_seconds: tuple[float, ...] = field(default=())  # of each kind, forward and backward

    def blocks(self) -> list[list[Option]]:
        """The options of each block, those of the last one with what comes after it."""
        found = [list(self.options[kind]) for kind in self.kinds]
        if self.keep_last:
            found[-1] = [option for option in found[-1] if not offloads(option.ways)]
        found[-1] = [replace(option, forward=max(option.forward, self.tail)) for option in found[-1]]
        return found

    def gradients_there(self) -> list[int]:
        """Bytes of gradients that are there in the backward of each block, beside its own."""
        if self.gradients_stay:
            return [self.static.gradients - own for own in self.gradients]
        after, found = 0, []
        for own in reversed(self.gradients):
            found.append(after)
            after += own
        if after > self.static.gradients:  # released as they come
            found = [min(there, self.static.gradients) for there in found]
        return found[::-1]

    @property
    def base(self) -> int:
        """Bytes beside the blocks' own."""
        return self.static.between + self.ends + self.carried

    @property
    def fixed_peak(self) -> int:
        """Bytes at the peaks that no option changes: of what lies before the blocks, in backward, and of the optimizer's step."""
        there = self.static.gradients if self.gradients_stay else min(sum(self.gradients), self.static.gradients)
        update = self.static.between + self.static.gradients + self.static.update
        return max(update, self.base + there + self.tail)

    def choose(self, budget: int) -> list[int] | None:
        """The options that add least time within a budget of bytes; None where nothing fits."""
        if budget < self.fixed_peak:
            return None
        room = budget - self.base
        blocks, gradients = self.blocks(), self.gradients_there()
        if room < least_room(blocks, gradients=gradients)[0]:
            return None
        units = (room // UNITS, room // UNITS**1.5, 1)  # near the least that is possible, rounding may leave nothing
        tried = (choose(blocks, room, gradients=gradients, unit=max(1, int(unit))) for unit in units)
        return next(found for found in tried if found is not None)

    def smallest(self) -> list[int]:
        """The options that take least at the peak."""
        return least_room(self.blocks(), gradients=self.gradients_there())[1]

    def least(self) -> int:
        """The least budget that has a choice."""
        return max(self.fixed_peak, self.base + least_room(self.blocks(), gradients=self.gradients_there())[0])

    def peak(self, chosen: Sequence[int]) -> int:
        """Bytes at the peak of a step with these options."""
        return max(self.fixed_peak, self.base + peak_of(self.blocks(), chosen, gradients=self.gradients_there()))

    def plain_peak(self) -> int:
        """As `peak`, with everything saved."""
        return self.peak([0] * len(self.kinds))

    def seconds(self, chosen: Sequence[int]) -> float:
        """Seconds that these options add to a micro-batch."""
        return sum(blocks[option].seconds for blocks, option in zip(self.blocks(), chosen, strict=True))

    def added_share(self, chosen: Sequence[int]) -> float:
        """As `seconds`, as a share of the blocks' own time."""
        own = sum(self.plain_seconds[kind] for kind in self.kinds) if self.plain_seconds else 0.0
        return self.seconds(chosen) / own if own else 0.0

    def ways(self, chosen: Sequence[int]) -> list[ActivationPolicies]:
        """The ways of each block."""
        return [
            cast(ActivationPolicies, dict(block[option].ways))
            for block, option in zip(self.blocks(), chosen, strict=True)
        ]


def kinds_of(keys: Sequence[object]) -> tuple[tuple[int, ...], list[list[int]]]:
    """The kind of each block, numbered as they come, and the blocks of each kind; `keys` tells blocks of a kind alike."""
    numbers: dict[object, int] = {}
    kinds = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
    return kinds, [[block for block, kind in enumerate(kinds) if kind == number] for number in range(len(numbers))]


def words_of(ways: Mapping[str, str]) -> str:
    """The ways of a block in words."""
    return ", ".join(f"{name} {way}" for name, way in ways.items()) or "save"


def runs_of(
    ways: Sequence[ActivationPolicies], by: Callable[[ActivationPolicies], str] = words_of
) -> list[tuple[str, int]]:
    """How many blocks have which ways, the most frequent first."""
    counts: dict[str, int] = {}
    for each in ways:
        counts[by(each)] = counts.get(by(each), 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
