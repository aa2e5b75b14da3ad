"""Which samples meet in which optimizer step: a function of samples, batch size, repeats, seed and step, of no rank.

A step holds samples of one bucket. Every (sample, repeat) is in exactly one step of an epoch; nothing is dropped and
nothing is drawn twice to fill up. The number of steps is the same in every epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmspeed.errors import UserError
from mmspeed.rng import generator
from mmspeed.shapes import Bucket

from .keys import canonical_json, digest
from .tables import Sample


@dataclass(frozen=True)
class Draw:
    """One use of a sample: the `repeat`-th time in an epoch."""

    sample: Sample
    epoch: int
    repeat: int

    @property
    def name(self) -> tuple[str, int, int]:
        """What every random draw of this use is keyed by (law 1)."""
        return self.sample.key, self.epoch, self.repeat


@dataclass(frozen=True)
class _Chunk:
    """A step of an epoch: positions [start, stop) in the shuffled uses of a bucket."""

    bucket: Bucket
    start: int
    stop: int


@dataclass(frozen=True)
class _Plan:
    """An epoch: the shuffled uses of each bucket (use u is sample u % n, repeat u // n), and its steps in order."""

    uses: dict[Bucket, torch.Tensor]
    steps: list[_Chunk]


class BatchSampler:
    """The order of training.

    Args:
        samples: the training split; their order does not matter.
        batch_size: samples of one step over all devices. The last step of a bucket in an epoch holds what is left.
        seed: seed of the order.
        repeats: uses of each sample in an epoch.

    Raises UserError when there are no samples.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int, seed: int, repeats: int = 1) -> None:
        if batch_size < 1 or repeats < 1:
            raise ValueError(f"batch_size and repeats must be at least 1, not {batch_size} and {repeats}")
        if not samples:
            raise UserError(
                "the data set has no training samples; `mmspeed check` tells why sources are rejected, "
                "and data.val_fraction how many are held out"
            )
        if len({sample.key for sample in samples}) < len(samples):
            raise ValueError("samples must have distinct keys; number_duplicates makes them so")
        self.batch_size, self.seed, self.repeats = batch_size, seed, repeats
        self._by_bucket: dict[Bucket, list[Sample]] = {}
        for sample in sorted(samples, key=lambda sample: (sample.bucket, sample.key)):
            self._by_bucket.setdefault(sample.bucket, []).append(sample)
        self._chunks = [
            _Chunk(bucket, start, min(start + batch_size, len(members) * repeats))
            for bucket, members in self._by_bucket.items()
            for start in range(0, len(members) * repeats, batch_size)
        ]
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # read-ahead may be an epoch further than training

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch: the sum over buckets of ceil(samples * repeats / batch_size)."""
        return len(self._chunks)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the samples, batch size and repeats: when it changes, a step number means other samples than before."""
        keys = sorted(sample.key for members in self._by_bucket.values() for sample in members)
        return digest(canonical_json([keys, self.batch_size, self.repeats]).encode())

    def locate(self, global_step: int) -> tuple[int, int]:
        """(epoch, index in the epoch) of a step counted from the start of training."""
        return divmod(global_step, self.steps_per_epoch)

    def step(self, epoch: int, index: int) -> list[Draw]:
        """The draws of one step over all devices: 1 to `batch_size`, of one bucket. IndexError past the epoch."""
        if not 0 <= index < self.steps_per_epoch:
            raise IndexError(f"an epoch has steps 0 to {self.steps_per_epoch - 1}, not {index}")
        plan = self._plan(epoch)
        chunk = plan.steps[index]
        members = self._by_bucket[chunk.bucket]
        uses = plan.uses[chunk.bucket][chunk.start : chunk.stop].tolist()
        return [Draw(members[use % len(members)], epoch, use // len(members)) for use in uses]

    def _make_plan(self, epoch: int) -> _Plan:
        uses = {
            bucket: torch.randperm(
                len(members) * self.repeats, generator=generator(self.seed, "sample_order", epoch, bucket.name)
            )
            for bucket, members in self._by_bucket.items()
        }
        order = torch.randperm(len(self._chunks), generator=generator(self.seed, "step_order", epoch))
        return _Plan(uses, [self._chunks[position] for position in order.tolist()])


def micro_batches(
    draws: Sequence[Draw], rank: int, world: int, micro_batch_size: int | None
) -> list[list[tuple[Draw, float]]]:
    """A rank's part of one step, cut into micro-batches of (draw, weight).

    Rank r of `world` takes draws r, r + world, ...; `micro_batch_size` None takes them all at once. Every rank gets the
    same number of micro-batches, and no micro-batch is empty: where a rank has no draw left it repeats one with weight
    0, so that all ranks meet in every collective. Over all ranks each draw has weight 1 exactly once.

    Raises ValueError for an empty step or a rank outside the world.
    """
    if not draws or not 0 <= rank < world or (micro_batch_size is not None and micro_batch_size < 1):
        raise ValueError(f"no micro-batches of {len(draws)} draws for rank {rank} of {world}, size {micro_batch_size}")
    largest_share = -(-len(draws) // world)
    size = micro_batch_size or largest_share
    share = [(draw, 1.0) for draw in draws[rank::world]]
    filler = [(draws[rank % len(draws)], 0.0)]
    return [share[start : start + size] or filler for start in range(0, largest_share, size)]
