"""Which samples meet in which optimizer step: a function of samples, batch size, repeats, seed and step, of no rank.

A step holds samples of one bucket. Every (sample, repeat) is in exactly one step of an epoch; nothing is dropped and
nothing is drawn twice to fill up. The number of steps is the same in every epoch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmspeed.errors import UserError
from mmspeed.rng import generator
from mmspeed.shapes import Bucket

from .compiled import Array
from .keys import KEY_LENGTH, canonical_json
from .mapped import SampleTable
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
class _Plan:
    """An epoch: the shuffled uses of each bucket (use u is sample u % n, repeat u // n), and the order of its steps."""

    uses: list[torch.Tensor]
    steps: torch.Tensor


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
        self.batch_size, self.seed, self.repeats = batch_size, seed, repeats
        self.samples = samples if isinstance(samples, SampleTable) else _in_order(samples)
        # Places in `samples`, not objects: there may be many millions.
        self._by_bucket = self.samples.by_bucket() if isinstance(self.samples, SampleTable) else _grouped(self.samples)
        self._buckets = list(self._by_bucket)
        steps = [-(-len(places) * repeats // batch_size) for places in self._by_bucket.values()]
        self._ends = np.cumsum(steps)  # steps of the buckets up to each one
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # read-ahead may be an epoch further than training

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch: the sum over buckets of ceil(samples * repeats / batch_size)."""
        return int(self._ends[-1])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the samples, batch size and repeats: when it changes, a step number means other samples than before."""
        # The digest of the canonical JSON of [keys, batch_size, repeats], which is never there as a whole.
        result, between = hashlib.sha256(b"[["), b""
        for keys in self._sorted_keys():
            result.update(between + canonical_json(keys)[1:-1].encode())
            between = b","
        result.update(f"],{self.batch_size},{self.repeats}]".encode())
        return result.hexdigest()[:KEY_LENGTH]

    def locate(self, global_step: int) -> tuple[int, int]:
        """(epoch, index in the epoch) of a step counted from the start of training."""
        return divmod(global_step, self.steps_per_epoch)

    def step(self, epoch: int, index: int) -> list[Draw]:
        """The draws of one step over all devices: 1 to `batch_size`, of one bucket. IndexError past the epoch."""
        if not 0 <= index < self.steps_per_epoch:
            raise IndexError(f"an epoch has steps 0 to {self.steps_per_epoch - 1}, not {index}")
        plan = self._plan(epoch)
        chunk = int(plan.steps[index])
        bucket = int(np.searchsorted(self._ends, chunk, side="right"))
        places = self._by_bucket[self._buckets[bucket]]
        start = (chunk - (int(self._ends[bucket - 1]) if bucket else 0)) * self.batch_size
        uses = plan.uses[bucket][start : start + self.batch_size].tolist()
        return [Draw(self.samples[int(places[use % len(places)])], epoch, use // len(places)) for use in uses]

    def _sorted_keys(self) -> Iterable[list[str]]:
        if isinstance(self.samples, SampleTable):
            return self.samples.sorted_keys()
        return [[sample.key for sample in self.samples]]

    def _make_plan(self, epoch: int) -> _Plan:
        uses = [
            torch.randperm(
                len(places) * self.repeats, generator=generator(self.seed, "sample_order", epoch, bucket.name)
            )
            for bucket, places in self._by_bucket.items()
        ]
        order = torch.randperm(self.steps_per_epoch, generator=generator(self.seed, "step_order", epoch))
        return _Plan(uses, order)


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    """Samples by their keys. Raises ValueError when two have the same."""
    ordered = sorted(samples, key=lambda sample: sample.key)
    if any(before.key == sample.key for before, sample in itertools.pairwise(ordered)):
        raise ValueError("samples must have distinct keys; number_duplicates makes them so")
    return ordered


def _grouped(samples: Sequence[Sample]) -> dict[Bucket, Array]:
    """The places of each bucket's samples, buckets in order."""
    places: dict[Bucket, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.bucket, []).append(place)
    return {bucket: np.array(places[bucket]) for bucket in sorted(places)}


def count_present(draws: Sequence[Draw]) -> int:
    """How many draws of a step are not lost: what its mean loss is taken over."""
    return sum(not draw.sample.lost for draw in draws)


def micro_batches(
    draws: Sequence[Draw], rank: int, world: int, micro_batch_size: int | None
) -> list[list[tuple[Draw, float]]]:
    """A rank's part of one step, cut into micro-batches of (draw, weight).

    Rank r of `world` takes draws r, r + world, ...; `micro_batch_size` None takes them all at once. Every rank gets the
    same number of micro-batches, and no micro-batch is empty: where a rank has no draw left it repeats one with weight
    0, so that all ranks meet in every collective. Over all ranks each draw has weight 1 exactly once; but in the place of a
    draw whose sample is lost stands a present one, with weight 0: the nearest of its micro-batch, else of the step.

    Raises ValueError for an empty step, one that is lost as a whole, or a rank outside the world.
    """
    if not draws or not 0 <= rank < world or (micro_batch_size is not None and micro_batch_size < 1):
        raise ValueError(f"no micro-batches of {len(draws)} draws for rank {rank} of {world}, size {micro_batch_size}")
    present = [place for place, draw in enumerate(draws) if not draw.sample.lost]
    if not present:
        raise ValueError("no draw of this step is there")
    largest_share = -(-len(draws) // world)
    size = micro_batch_size or largest_share
    share = list(range(rank, len(draws), world))
    micro = [share[start : start + size] for start in range(0, largest_share, size)]
    return [_filled(draws, places, rank % len(draws), present) for places in micro]


def _filled(draws: Sequence[Draw], places: list[int], filler: int, present: list[int]) -> list[tuple[Draw, float]]:
    """A micro-batch of the draws at `places`; what is lost, or the filler of an empty one, is replaced with weight 0."""
    own = [place for place in places if not draws[place].sample.lost] or present

    def instead(place: int) -> Draw:
        return draws[min(own, key=lambda other: abs(other - place))]

    if not places:
        return [(instead(filler), 0.0)]
    return [(instead(p), 0.0) if draws[p].sample.lost else (draws[p], 1.0) for p in places]
