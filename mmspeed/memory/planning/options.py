"""List a block's options, and model a step's memory to choose among them. Nothing here runs a model.

A step's memory is the static memory between steps, that outside of the blocks, and that which blocks keep and take; see `StepFigures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, product
from operator import mul
from typing import cast

from mmspeed.config.memory import ActivationPolicy, MemoryConfig, parse_bytes
from mmspeed.memory.recompute.regions import ActivationPolicies

from .knapsack import Option, choose, least_room, peak_of

BRANCHES = ("attention", "cross_attention", "mlp")
SMALL: ActivationPolicies = {"norm": "recompute", "activation": "recompute"}
OF_EXPERTS: tuple[ActivationPolicy, ...] = ("recompute", "offload_recompute")  # of rows that a product takes
INNER = ("dispatch", "experts")  # parts of an MLP, beside which it has no way of its own
WAYS: tuple[ActivationPolicy, ...] = ("recompute", "selective", "offload_recompute", "offload_selective", "offload")
UNITS = 1 << 14  # of the room: bytes are rounded up to such a unit where an exact choice would take long

# -- options of a block ------------------------------------------------------------------------------------------------


def offloads(ways: Mapping[str, str]) -> bool:
    """True where anything goes to the host."""
    return any(way.startswith("offload") for way in ways.values())


def single_policies(spans: Sequence[str], with_swap: bool) -> list[ActivationPolicies]:
    """The policies that are measured for a block with these spans: saving everything first, then each way of each span alone."""
    each = [way for way in WAYS if with_swap or not way.startswith("offload")]
    policies: list[ActivationPolicies] = [{}, *({"block": way} for way in each)]
    policies += [{span: way} for span in BRANCHES if span in spans for way in each]
    policies += [{span: way} for span in INNER if span in spans for way in each if way in OF_EXPERTS]
    if all(span in spans for span in SMALL):
        policies.append(SMALL)
    return policies


def combinations(singles: Sequence[Option]) -> list[Option]:
    """All options of a block, from the figures of each single way: figures of branches, and of parts of an MLP, add up.

    `kept`, `host` and `seconds` are then right. The peaks are not known yet, and are those of the first single.
    """
    plain = next(option for option in singles if not option.ways)
    branches: dict[str, list[Option]] = {}
    for option in singles:
        if len(option.ways) == 1 and next(iter(option.ways)) in (*BRANCHES, *INNER):
            branches.setdefault(next(iter(option.ways)), []).append(option)
    options = [option for option in singles if not option.ways or not set(option.ways) <= {*BRANCHES, *INNER}]
    for taken in product(*([plain, *own] for own in branches.values())):
        changed = [option for option in taken if option.ways]
        names = {name for option in changed for name in option.ways}
        if names and not ("mlp" in names and names & {*INNER}):
            options.append(
                replace(
                    plain,
                    kept=plain.kept + sum(option.kept - plain.kept for option in changed),
                    host=sum(option.host for option in changed),
                    seconds=sum(option.seconds for option in changed),
                    ways={name: way for option in changed for name, way in option.ways.items()},
                )
            )
    return options


def front(options: Sequence[Option], most: int | None = None) -> list[Option]:
    """The options that no other equals or beats in bytes kept and seconds.

    `most`: at most so many of them, spread evenly over the bytes, the extremes among them.
    """

    def figures(option: Option) -> tuple[float, float]:
        return option.kept, option.seconds

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
    """The options that no other beats in bytes kept and at the peak, whatever their time: the least budget depends on these alone."""
    left: list[Option] = []
    for option in sorted(options, key=lambda option: (option.kept, _peak(option), option.seconds)):
        if not left or _peak(option) < _peak(left[-1]):
            left.append(option)
    return left


def _peak(option: Option) -> int:
    """Bytes above `kept`, in forward or in backward."""
    return max(option.forward, option.backward)


# -- memory of a step --------------------------------------------------------------------------------------------------

STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.1, "muon": 4.5}  # per parameter; about, for muon: some have two moments


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on a device that do not depend on the computation.

    parameters: those that train. update: an optimizer step's own workspace. frozen: weights that do not train.
    """

    parameters: int
    master: int
    states: int
    average: int
    gradients: int
    update: int
    frozen: int = 0

    @property
    def between(self) -> int:
        """Bytes between steps."""
        return self.parameters + self.master + self.states + self.average + self.frozen


def static_bytes(
    numbers: int,
    memory: MemoryConfig,
    *,
    average: bool,
    optimizer: str = "adamw",
    largest: int = 0,
    by_lists: bool = True,
    frozen: int = 0,
) -> StaticMemory:
    """The static memory of so many parameters that train, on a device that holds them, by formula.

    average: whether they have a moving average. largest: elements of the largest parameter, which a bucket must at least hold.
    frozen: bytes of weights that do not train. by_lists: False where the optimizer takes one parameter after another, as AdamW does on the CPU.
    """
    half = memory.master != "parameters"
    each = STATE_BYTES.get(optimizer, 8.0)
    bucket = 4 * max(largest, min(numbers, parse_bytes(memory.bucket) // 4))
    if memory.tiered:  # masters and states of a bucket and of the next one that comes, and the update itself
        update = (2 if half else 1) * bucket + (2 * int(bucket * each / 4) if memory.states == "host" else 0)
    elif by_lists:  # the kernels of lists of tensors hold one float32 value for each parameter at a time
        update = 4 * numbers
    else:  # a root and a quotient
        update = 2 * 4 * largest
    return StaticMemory(
        parameters=(2 if half else 4) * numbers,
        master={"parameters": 0, "float32": 4, "split": 2, "host": 0}[memory.master] * numbers,
        states=0 if memory.states == "host" else int(each * numbers),
        average=4 * numbers if average and memory.ema == "device" else 0,
        gradients=4 * numbers if not memory.release_gradients else min(4 * numbers, 2 * bucket),
        update=update,
        frozen=frozen,
    )


@dataclass(frozen=True)
class Flight:
    """What a rank of a pipeline has at one time of a step.

    blocks: for each block the micro-batches between its forward and its backward pass, the one that computes among them. at: the places of
    the blocks that compute. beside: bytes of micro-batches that were read and of messages. sums: whether it is the last backward pass of
    these blocks, in which gradients are summed over shards. kind: of the pass. ahead: of a pair, the places of the blocks of the forward
    pass. waiting: for each block the micro-batches whose gradients of weights wait. made: whether each block has gradients of
    earlier micro-batches.
    """

    blocks: tuple[int, ...]
    at: range
    beside: int
    sums: bool = False
    kind: str = "backward"
    ahead: range = range(0)
    waiting: tuple[int, ...] = ()
    made: tuple[bool, ...] = ()


@dataclass(frozen=True)
class StepFigures:
    """The costs of a step of one micro-batch; of a rank of a pipeline, with the micro-batches that its `flights` tell.

    Args:
        static: between steps and in the update.
        ends: bytes that the batch and the layers before and after the blocks keep.
        tail: bytes above all that is kept, at the peak of the layers before and after the blocks.
        carried: bytes of the gradients that all blocks add to, such as those of the caption.
        kinds: the kind of each block.
        options: of each kind; the first saves everything.
        gradients: bytes of the gradients of each block.
        frozen: bytes of the frozen weights of each block.
        experts: of the experts of each block that other devices do not hold: numbers that train, bytes of those that do not.
        gradients_stay: whether all gradients exist from the start: with accumulation, and with replicas.
        keep_last: whether the last block offloads nothing.
        flights: of a rank of a pipeline; none where each micro-batch's backward follows its forward.
        sums: bytes of each block with which gradients are summed over shards in a flight: as they are sent, and their shard, less its weights.
        fresh: bytes of the largest gradient of each block, which is added to those of earlier micro-batches in a flight.
        weights_wait: whether the gradients of weights wait: at most to the next exchange where it `fills` them in.
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
    frozen: tuple[int, ...] = ()
    experts: tuple[tuple[int, int], ...] = ()
    plain_seconds: tuple[float, ...] = field(default=())  # of each kind, forward and backward
    flights: tuple[Flight, ...] = ()
    sums: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    weights_wait: bool = False
    fills: bool = False
    head_widths: Mapping[int, int] = field(default_factory=dict)  # operations of attention, where shapes tell them

    def with_host_base(self) -> StepFigures:
        """The figures where the frozen weights of blocks rest in the host's memory."""
        return replace(self, static=replace(self.static, frozen=self.static.frozen - sum(self.frozen)))

    def blocks(self) -> list[list[Option]]:
        """The options of each block; those of the last one include the peak of the layers after it."""
        options = [list(self.options[kind]) for kind in self.kinds]
        if self.keep_last:
            options[-1] = [option for option in options[-1] if not offloads(option.ways)]
        options[-1] = [replace(option, forward=max(option.forward, self.tail)) for option in options[-1]]
        return options

    def resident_gradients(self) -> list[int]:
        """Bytes of gradients that exist in the backward of each block, beside its own."""
        if self.gradients_stay:  # those of a pipeline's blocks were measured with gradients of an earlier micro-batch
            return [self.static.gradients - own * (not self.flights) for own in self.gradients]
        after, sizes = 0, []
        for own in reversed(self.gradients):
            sizes.append(after)
            after += own
        if after > self.static.gradients:  # released as they come
            sizes = [min(nbytes, self.static.gradients) for nbytes in sizes]
        return sizes[::-1]

    @property
    def base(self) -> int:
        """Bytes beside the blocks' own."""
        return self.static.between + self.ends + self.carried

    @property
    def fixed_peak(self) -> int:
        """Bytes at the peaks that no option changes: in backward of the layers before the blocks, and in the optimizer's step."""
        gradients = self.static.gradients if self.gradients_stay else min(sum(self.gradients), self.static.gradients)
        update = self.static.between + self.static.gradients + self.static.update
        return max(update, self.base + gradients + self.tail)

    def choose(self, budget: int, host_room: int | None = None) -> list[int] | None:
        """The options that add least time within a budget of bytes, and within the host's room; None where nothing fits."""
        if budget < self.fixed_peak:
            return None
        heaviest = self.heaviest
        room = budget - self.base - heaviest.beside
        while (choice := self._within(room, heaviest.blocks, host_room)) is not None:
            over = self.peak(choice) - budget if self.flights else 0
            if over <= 0:
                return choice
            room -= over  # at another time, or in an earlier block
        return smallest if self.flights and self.peak(smallest := self.smallest()) <= budget else None

    def _within(self, room: int, in_flight: Sequence[int], host_room: int | None) -> list[int] | None:
        """The options that add least time within a room for what blocks keep and take."""
        blocks, gradients = self.blocks(), self.resident_gradients()
        if room < least_room(blocks, in_flight, gradients=gradients)[0]:
            return None
        units = (room // UNITS, room // UNITS**1.5, 1)  # near the least that is possible, rounding may leave nothing
        tried = (
            choose(blocks, room, in_flight, gradients=gradients, host_room=host_room, unit=max(1, int(unit)))
            for unit in units
        )
        return next((choice for choice in tried if choice is not None), None)

    @property
    def heaviest(self) -> Flight:
        """The time at which most is kept, if all is."""
        plain = [options[0].kept for options in self.blocks()]
        alone = Flight((1,) * len(plain), range(len(plain)), 0)
        weighed = {flight: flight.beside + sum(map(mul, flight.blocks, plain)) for flight in self.flights or (alone,)}
        return max(weighed, key=weighed.__getitem__)

    def smallest(self) -> list[int]:
        """The options with the lowest peak."""
        return least_room(self.blocks(), self.heaviest.blocks, gradients=self.resident_gradients())[1]

    def least(self) -> int:
        """The least budget for which there is a choice."""
        return self.peak(self.smallest())

    def alike(self) -> list[list[int]]:
        """The choices in which all blocks take the same ways."""
        numbers = [{tuple(option.ways.items()): n for n, option in enumerate(options)} for options in self.options]
        shared = [ways for ways in numbers[0] if all(ways in own for own in numbers)]
        return [[numbers[kind][ways] for kind in self.kinds] for ways in shared]

    def peak(self, chosen: Sequence[int]) -> int:
        """Bytes at the peak of a step with these options."""
        blocks, gradients = self.blocks(), self.resident_gradients()
        options = [own[option] for own, option in zip(blocks, chosen, strict=True)]
        times = [self._bytes_in(flight, options) for flight in self.flights]
        return max(self.fixed_peak, self.base + max(times or [peak_of(blocks, chosen, gradients=gradients)]))

    def _bytes_in(self, flight: Flight, options: Sequence[Option]) -> int:
        """Bytes at the peak of a time of a pipeline's rank: what blocks hold and take, with the gradients that there are, and beside them."""
        at, ahead = (options[each.start : each.stop] for each in (flight.at, flight.ahead))
        here = slice(flight.at.start, flight.at.stop)
        held: int = flight.beside + sum(count * one.kept for count, one in zip(flight.blocks, options, strict=True))
        held += sum(count * one.waits for count, one in zip(flight.waiting, options, strict=True))
        outside = self.static.gradients - sum(self.gradients)
        held += sum(compress(self.gradients, flight.made)) + any(flight.made) * outside - sum(one.kept for one in ahead)
        fresh = max(self.fresh[here])
        if flight.kind == "weight":
            return held + fresh
        held -= sum(one.kept for one in at)
        until = list(accumulate(one.kept for one in at))
        if flight.kind == "forward":
            return held + max(kept + one.forward for kept, one in zip(until, at, strict=True))
        behind = list(accumulate((one.waits for one in reversed(at)), initial=0))
        left = [one.waits for one in (*at[1:], at[-1])] if self.fills else behind[-2::-1]
        back = [(kept + waits, one.backward) for kept, one, waits in zip(until, at, left, strict=True)][::-1]
        if flight.kind == "backward" and self.weights_wait and not self.fills:
            back.append((behind[-1], fresh))
        if flight.sums and self.sums and self.weights_wait:
            back.append((0, max(self.sums[here])))
        elif flight.sums and self.sums:  # while a block computes, gradients of the one behind are still being sent
            sent = (*self.gradients[here][1:], 0)[::-1]
            back = [(kept, takes + each) for (kept, takes), each in zip(back, sent, strict=True)]
            back += zip((0, *until), self.sums[here], strict=False)
        along = list(zip(accumulate(one.kept for one in ahead), (one.forward for one in ahead), strict=True))
        gone = [(sum(one.kept for one in ahead), 0)] * len(back)
        # one of a pair computes at a time: the other one, which waits in an exchange, has what it keeps
        both = zip(back, [*along, *gone], strict=False)
        return held + max(kept + other + max(takes, more) for (kept, takes), (other, more) in both)

    def plain_peak(self) -> int:
        """Bytes at the peak of a step that saves everything."""
        return self.peak([0] * len(self.kinds))

    def seconds(self, chosen: Sequence[int]) -> float:
        """Seconds that these options add to a micro-batch."""
        return sum(blocks[option].seconds for blocks, option in zip(self.blocks(), chosen, strict=True))

    def added_share(self, chosen: Sequence[int]) -> float:
        """The added time of these options as a share of the blocks' own time."""
        own = sum(self.plain_seconds[kind] for kind in self.kinds) if self.plain_seconds else 0.0
        return self.seconds(chosen) / own if own else 0.0

    def ways(self, chosen: Sequence[int]) -> list[ActivationPolicies]:
        """The ways of each block."""
        return [
            cast(ActivationPolicies, dict(block[option].ways))
            for block, option in zip(self.blocks(), chosen, strict=True)
        ]


def kinds_of(keys: Sequence[object]) -> tuple[tuple[int, ...], list[list[int]]]:
    """The kind of each block, numbered in order, and the blocks of each kind; blocks with equal `keys` are of one kind."""
    numbers: dict[object, int] = {}
    kinds = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
    return kinds, [[block for block, kind in enumerate(kinds) if kind == number] for number in range(len(numbers))]


def words_of(ways: Mapping[str, str]) -> str:
    """The ways of a block in words."""
    return ", ".join(f"{name} {way}" for name, way in ways.items()) or "save"


def runs_of(ways: Sequence[ActivationPolicies]) -> list[tuple[str, int]]:
    """The number of blocks with each combination of ways, the most frequent first."""
    counts: dict[str, int] = {}
    for each in ways:
        counts[words_of(each)] = counts.get(words_of(each), 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
