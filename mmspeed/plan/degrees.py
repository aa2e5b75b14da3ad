"""Traffic of each degree of sequence parallelism for a video split over a number of devices, and the recommended degree.

Bytes are those of `plan.traffic`, of the first device (whose parts are the largest), in a step of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmspeed.axes import TOKENS
from mmspeed.config.parallel import ParallelConfig
from mmspeed.log import format_bytes

from .traffic import AttentionWorkload, held_tokens, places, step_traffic


@dataclass(frozen=True)
class DegreeCost:
    """A way to split a video, such as "dsp 2 x ulysses 2": bytes sent, devices without a token in some blocks; or why it is refused."""

    name: str
    sent: int = 0
    idle: int = 0
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: not here ({self.refused})"
        idle = f", and leaves {self.idle} of them without tokens in some blocks" if self.idle else ""
        return f"{self.name}: {format_bytes(self.sent)}{idle}"


def degree_costs(work: AttentionWorkload, parallel: ParallelConfig, devices: int) -> list[DegreeCost]:
    """The costs of each degree alone, then of products where a single one does not fit, then of the section's own degrees if they differ.

    The section gives the other settings: `tp`, `shard`, `shard_text`.
    """
    costs = [_cost(work, _split(parallel, **{axis.value: devices})) for axis in reversed(TOKENS)]
    fits = [each for each in range(2, devices) if devices % each == 0]
    heads, frames = work.heads // parallel.tp, work.shape[0]
    if heads < devices and (several := [each for each in fits if each <= heads]):
        costs.append(_cost(work, _split(parallel, ulysses=several[-1], ring=devices // several[-1])))
    few = [each for each in fits if each <= frames and devices // each <= heads]
    if "full" not in work.spans and frames < devices and few:
        costs.append(_cost(work, _split(parallel, dsp=few[-1], ulysses=devices // few[-1], shard="space")))
    own = _cost(work, parallel)
    return costs if parallel.sequence != devices or own in costs else [*costs, own]


def recommended(costs: list[DegreeCost]) -> DegreeCost | None:
    """The way that leaves the fewest devices idle, and of those the one that sends least; None where all are refused."""
    possible = [cost for cost in costs if not cost.refused]
    return min(possible, key=lambda cost: (cost.idle, cost.sent), default=None)


def _split(parallel: ParallelConfig, **changes: object) -> ParallelConfig:
    """The section with these degrees, and no others."""
    return parallel.model_copy(update={**{axis.value: 1 for axis in TOKENS}, "ring_window": None, **changes})


def _cost(work: AttentionWorkload, parallel: ParallelConfig) -> DegreeCost:
    heads, full, sizes = work.heads // parallel.tp, "full" in work.spans, parallel.sizes()
    name = " x ".join(f"{axis} {sizes[axis]}" for axis in TOKENS if sizes[axis] > 1)
    if parallel.shard == "space" and not full and parallel.ring * parallel.ulysses > 1:
        name += " with shard: space"
    if parallel.dsp > 1 and full:
        return DegreeCost(name, refused="it is for factorised models")
    if parallel.ulysses > heads:
        return DegreeCost(name, refused=f"a device has {heads} heads")
    sent = step_traffic(work, parallel, next(places(parallel))).total()
    idle = max(held_tokens(work, parallel, span).count(0) for span in set(work.spans))
    return DegreeCost(name, sent, idle)


def degree_lines(work: AttentionWorkload, parallel: ParallelConfig, devices: int, of: str) -> list[str]:
    """Lines for the ways to split a video over `devices` devices, one marked as recommended; `of` names the video."""
    costs = degree_costs(work, parallel, devices)
    best = recommended(costs)
    head = f"{of} split over {devices} devices: bytes that one sends in forward and backward of a sample"
    return [head, *(f"  {cost}{' (recommended)' if cost == best else ''}" for cost in costs)]
