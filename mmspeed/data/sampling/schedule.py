"""Schedule the buckets of each step of an epoch, and the samples of each. Pure functions of counts and costs.

A step has `slots` device batches. Most steps hold full device batches of one bucket (or of several that cost the same). The rest of
each bucket goes into the tail: from the costliest bucket down, its last device batches are joined, in each free slot, by as many
samples of cheaper buckets as cost the same, so that no device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmspeed.rng import Stream

from .assignment import Cost

Array = npt.NDArray[Any]
Mix = Literal["same", "matched", "window"]
_WORTH = 0.5  # of a slot's cost: the least that cheaper samples must cost to share a tail step without matching


@dataclass(frozen=True)
class BucketSupply:
    """A bucket's part of an epoch."""

    uses: int
    batch: int  # samples of a device batch
    cost: Cost
    slots: int  # device batches of a step: of sequence-parallel groups for videos, of ranks for images

    @property
    def step(self) -> int:
        """Samples of a step that holds only this bucket."""
        return self.slots * self.batch


@dataclass(frozen=True)
class EpochPartition:
    """An epoch divided into steps, before they are shuffled: it uses no random number, so every epoch has the same number of steps."""

    # of (bucket, slots, samples a slot); a step draws its slots from one
    classes: tuple[tuple[tuple[int, int, int], ...], ...]
    slots: tuple[int, ...]  # of a step of each class
    tail: tuple[dict[int, int], ...]  # samples of each bucket in each step of the tail

    @property
    def steps(self) -> int:
        full = sum(
            sum(part[1] for part in parts) // slots for parts, slots in zip(self.classes, self.slots, strict=True)
        )
        return full + len(self.tail)


@dataclass(frozen=True)
class EpochSchedule:
    """The steps of an epoch in order, as pieces: `count` uses of one bucket, from `start` in its order."""

    offsets: Array  # (steps + 1): the pieces of step i are [offsets[i], offsets[i + 1])
    bucket: Array
    count: Array
    start: Array

    @property
    def steps(self) -> int:
        return len(self.offsets) - 1

    def pieces(self, step: int) -> list[tuple[int, int, int]]:
        """(bucket, start, count) of each piece of a step."""
        part = slice(int(self.offsets[step]), int(self.offsets[step + 1]))
        return list(zip(*(column[part].tolist() for column in (self.bucket, self.start, self.count)), strict=True))

    def used(self, step: int, buckets: int) -> list[int]:
        """Uses of each bucket in the steps before `step`."""
        part = slice(0, int(self.offsets[step]))
        return np.bincount(self.bucket[part], weights=self.count[part], minlength=buckets).astype(np.int64).tolist()


def partition_epoch(supplies: Sequence[BucketSupply], mix: Mix = "same", tolerance: float = 0.02) -> EpochPartition:
    """Divide an epoch into full steps and the tail. Every use is in exactly one step."""
    classes: list[list[list[int]]] = []
    rest = [supply.uses for supply in supplies]
    for members in _classes(supplies, mix, tolerance):
        slots = supplies[members[0][0]].slots
        parts = [[bucket, supplies[bucket].uses // size, size] for bucket, size in members]
        spare = sum(part[1] for part in parts) % slots
        for part in sorted(parts, key=lambda part: -part[1]):  # from the fullest, so that every bucket keeps some
            less = min(spare, part[1])
            part[1], spare = part[1] - less, spare - less
        for bucket, count, size in parts:
            rest[bucket] -= count * size
        classes.append(parts)
    tail: list[dict[int, int]] = []
    for slots in sorted({supply.slots for supply in supplies}):
        alike = [bucket for bucket, supply in enumerate(supplies) if supply.slots == slots]
        tail += _tail(supplies, alike, rest, classes, tolerance)
    return EpochPartition(
        tuple(tuple((part[0], part[1], part[2]) for part in parts) for parts in classes),
        tuple(supplies[parts[0][0]].slots for parts in classes),
        tuple(tail),
    )


def shuffle(division: EpochPartition, draws: Stream) -> EpochSchedule:
    """The steps of one epoch in a random order; within a class, the combination of slots is random too."""
    steps, buckets, counts, step_count = [], [], [], 0
    for parts, slots in zip(division.classes, division.slots, strict=True):
        number = sum(part[1] for part in parts) // slots
        if not number:
            continue
        if len(parts) == 1:
            row, part_index, repeats = np.arange(number), np.zeros(number, np.int64), np.full(number, slots)
        else:
            drawn = np.repeat(np.arange(len(parts)), [part[1] for part in parts])
            drawn = drawn[draws.permutation(len(drawn))]
            met, repeats = np.unique(np.arange(len(drawn)) // slots * len(parts) + drawn, return_counts=True)
            row, part_index = np.divmod(met, len(parts))
        steps.append(step_count + row)
        buckets.append(np.array([part[0] for part in parts])[part_index])
        counts.append(repeats * np.array([part[2] for part in parts])[part_index])
        step_count += number
    for step in division.tail:
        steps.append(np.full(len(step), step_count))
        buckets.append(np.array(list(step)))
        counts.append(np.array(list(step.values())))
        step_count += 1
    return _ordered(np.concatenate(steps), np.concatenate(buckets), np.concatenate(counts), step_count, draws)


def _ordered(step: Array, bucket: Array, count: Array, steps: int, draws: Stream) -> EpochSchedule:
    """Pieces in the order of their shuffled steps, with their starts in their buckets' orders."""
    step = draws.permutation(steps)[step]
    order = np.lexsort((bucket, step))
    step, bucket, count = step[order], bucket[order], count[order]
    by_bucket = np.argsort(bucket, kind="stable")
    before = np.cumsum(count[by_bucket]) - count[by_bucket]
    start = np.empty_like(before)
    start[by_bucket] = before - before[np.searchsorted(bucket[by_bucket], bucket[by_bucket])]
    return EpochSchedule(np.searchsorted(step, np.arange(steps + 1)), bucket, count, start)


def _classes(supplies: Sequence[BucketSupply], mix: Mix, tolerance: float) -> list[list[tuple[int, int]]]:
    """Groups of (bucket, samples a slot) whose slots may share a step: they cost the same, or `mix` allows it."""
    remaining = [bucket for bucket, supply in enumerate(supplies) if supply.uses]
    remaining.sort(key=lambda bucket: (-supplies[bucket].cost.each, bucket))
    classes = []
    while remaining:
        lead = supplies[remaining[0]]
        if mix == "same":
            members = [(remaining[0], lead.batch)]
        elif mix == "window":
            members = [(bucket, supplies[bucket].batch) for bucket in remaining if supplies[bucket].slots == lead.slots]
        else:
            members = _matching(supplies, remaining, lead, lead.cost.of(lead.batch), 1 - tolerance)
        classes.append(members)
        used = {bucket for bucket, _ in members}
        remaining = [bucket for bucket in remaining if bucket not in used]
    return classes


def _matching(
    supplies: Sequence[BucketSupply], buckets: Sequence[int], lead: BucketSupply, target: float, least: float
) -> list[tuple[int, int]]:
    """(bucket, samples a slot) of the buckets whose slot costs `least` to 1 of `target`, the nearest first."""
    matches = []
    for bucket in buckets:
        supply = supplies[bucket]
        size = min(supply.batch, supply.cost.fitting(target))
        share = supply.cost.of(size) / target
        if size and supply.slots == lead.slots and share >= least:
            matches.append((-round(share, 9), supply.cost.each, bucket, size))
    return [(bucket, size) for _, _, bucket, size in sorted(matches)]


def _tail(
    supplies: Sequence[BucketSupply],
    alike: list[int],
    rest: list[int],
    classes: list[list[list[int]]],
    tolerance: float,
) -> list[dict[int, int]]:
    """Steps of the remaining uses of the buckets `alike`; changes `rest` and `classes`: full steps may be split to fill up."""
    part_of = {part[0]: part for parts in classes for part in parts}
    order = sorted(set(alike) & set(part_of), key=lambda bucket: (-supplies[bucket].cost.each, bucket))
    steps = []
    for index, lead in enumerate(order):
        while rest[lead]:
            supply = supplies[lead]
            size = min(supply.batch, rest[lead])
            step = {lead: min(rest[lead], supply.slots * size)}
            rest[lead] -= step[lead]
            free = supply.slots - -(-step[lead] // size)
            target = supply.cost.of(size)
            cheaper = order[index + 1 :]
            alike_cost = _matching(supplies, cheaper, supply, target, 1 - tolerance)
            for give_back in (False, True):
                for bucket, most in alike_cost:
                    free = _fill(step, rest, bucket, most, free)
                    if give_back and free and part_of[bucket][1] >= supply.slots:
                        part_of[bucket][1] -= supply.slots
                        rest[bucket] += supply.slots * part_of[bucket][2]
                        free = _fill(step, rest, bucket, most, free)
            for bucket, most in _matching(supplies, cheaper, supply, target, _WORTH):
                free = _fill(step, rest, bucket, most, free)
            if len(step) == 1 and part_of[lead][1] >= supply.slots:
                steps += _spread(step, lead, supply, part_of[lead])
            else:
                steps.append(step)
    return steps


def _fill(step: dict[int, int], rest: list[int], bucket: int, size: int, free: int) -> int:
    """Put the remaining uses of a bucket into free slots of a step, `size` samples each; return the slots that stay free."""
    added = min(rest[bucket], free * size)
    if not added:
        return free
    rest[bucket] -= added
    step[bucket] = step.get(bucket, 0) + added
    return free - -(-added // size)


def _spread(step: dict[int, int], lead: int, supply: BucketSupply, full_slots: list[int]) -> list[dict[int, int]]:
    """Distribute a last step of one bucket over itself and one full step, if that leaves fewer slots short.

    With t whole samples a slot and a remainder, one step gets t + 1 samples in every slot, and the other has slots that are full or
    lack one sample.
    """
    per_slot, over = divmod(step[lead], supply.slots)
    if not over or full_slots[2] != supply.batch or per_slot >= supply.batch - 1:
        return [step]
    full_slots[1] -= supply.slots
    return [{lead: supply.slots * (per_slot + 1)}, {lead: supply.slots * (supply.batch - 1) + over}]
