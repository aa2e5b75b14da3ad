"""The samples of each optimizer step: a function of samples, batching, seed and step, independent of rank and world size."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mmspeed.data.cache.index_reader import SampleTable
from mmspeed.data.cache.keys import KEY_LENGTH, canonical_json
from mmspeed.errors import UserError
from mmspeed.protocols import OrderedSample, ShapeClass

from .mixture import BucketUses
from .order import Batching, Order, SamplerState, StepLocation, TrainingStage
from .schedule import Array

S = TypeVar("S", bound=OrderedSample)
S_co = TypeVar("S_co", bound=OrderedSample, covariant=True)


@dataclass(frozen=True)
class SampleUse(Generic[S_co]):
    """One use of a sample in an epoch; `repeat` counts its earlier uses. `left_out`: it keeps its place and is not computed."""

    sample: S_co
    epoch: int
    repeat: int
    left_out: bool = False

    @property
    def lost(self) -> bool:
        """True for a use that counts nothing: left out, or of a lost sample."""
        return self.left_out or self.sample.lost

    @property
    def name(self) -> tuple[str, int, int]:
        """The key of every random draw of this use (law 1)."""
        return self.sample.key, self.epoch, self.repeat


class Sampler(Protocol[S]):
    """The order of training as loaders and tasks ask for it: of samples that are there (`BatchSampler`), or of packs (`PackSampler`)."""

    batching: Batching

    @property
    def fingerprint(self) -> str:
        """A name for the content of all samples."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        ...

    @property
    def first_pass(self) -> int:
        """The step by which the first epoch has ended."""
        ...

    def samples_of(self, stage: int) -> int:
        """The number of samples that a stage uses."""
        ...

    def draws(self, step: int) -> list[SampleUse[S]]:
        """The draws of one optimizer step over all devices."""
        ...

    def leave_out(self, steps: range) -> list[SampleUse[S]]:
        """Leave the uses of these steps out; returns those that counted until now."""
        ...

    def locate(self, step: int) -> StepLocation:
        """The position of an optimizer step."""
        ...

    def mean_of_epoch(self, step: int, size: Callable[[ShapeClass], float]) -> float:
        """The mean over the steps of `step`'s epoch of the sizes of their samples."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """The state for a checkpoint taken before `step`."""
        ...

    def resume(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a checkpoint's state. Returns a message about changes, or None."""
        ...


class BatchSampler(Order, Generic[S]):
    """The order of training, with the samples in it.

    Args:
        samples: the training split; their order does not matter.
        batching: sizes and costs of a step's batches; a number: samples of a step, for any bucket.
        seed: seed of the order.
        stages: parts of training; none: a single one of all buckets.

    Raises UserError if there are no samples, or none for a stage.
    """

    def __init__(
        self, samples: Sequence[S], batching: Batching | int, seed: int, stages: Sequence[TrainingStage] = ()
    ) -> None:
        if not samples:
            raise UserError(
                "the sources have no training samples; `mmspeed check` shows why sources are rejected, "
                "and data.val_fraction sets the share held out"
            )
        mapped = isinstance(samples, SampleTable)
        self.samples: Sequence[S] = samples if mapped else _in_order(samples)
        # Indices into `samples`, not objects: there may be many millions.
        groups = self.samples.by_group() if isinstance(self.samples, SampleTable) else _grouped(self.samples)
        super().__init__(groups, Batching(batching) if isinstance(batching, int) else batching, seed, stages)
        self._left_out: list[tuple[int, str, int, int]] = []  # epoch, bucket, first use, the use after the last
        self._uses = functools.lru_cache(maxsize=2)(self._make_uses)  # reading ahead may be an epoch beyond training

    def draws(self, step: int) -> list[SampleUse[S]]:
        """The draws of one optimizer step over all devices, those of one bucket together, buckets in order; left out ones are marked."""
        location = self.locate(step)
        uses_drawn: list[SampleUse[S]] = []
        uses = self._uses(location.stage, location.epoch)
        for bucket, start, count in self.pieces(step):
            gaps = [(a, b) for epoch, name, a, b in self._left_out if (epoch, name) == (location.epoch, bucket.name)]
            uses_drawn += [
                SampleUse(self.samples[index], location.epoch, repeat, any(a <= number < b for a, b in gaps))
                for number, (index, repeat) in enumerate(uses[bucket][start : start + count], start)
            ]
        return uses_drawn

    def leave_out(self, steps: range) -> list[SampleUse[S]]:
        """Leave the uses of these steps out, in whatever steps they are; returns those that counted until now."""
        gone: list[SampleUse[S]] = []
        for step in steps:
            gone += [draw for draw in self.draws(step) if not draw.lost]
            epoch = self.locate(step).epoch
            self._left_out += [(epoch, bucket.name, start, start + count) for bucket, start, count in self.pieces(step)]
        return gone

    def _make_uses(self, stage: int, epoch: int) -> dict[ShapeClass, BucketUses]:
        return {bucket: BucketUses(pools, epoch, self.seed) for bucket, pools in self.pools[stage].items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the samples' keys."""
        result, between = hashlib.sha256(b"["), b""
        for keys in self._sorted_keys():
            result.update(between + canonical_json(keys)[1:-1].encode())
            between = b","
        return result.hexdigest()[:KEY_LENGTH]

    def data_fingerprint(self, stage: int) -> str:
        """A digest of the samples and of their uses in an epoch of a stage, which `SamplerState.used` counts."""
        return _digest([self.fingerprint, self._uses_of(stage)])

    @functools.cached_property
    def order_fingerprint(self) -> str:
        """A digest of everything that determines the division of the uses of all stages into steps."""
        batching = self.batching
        rows = [
            [bucket.name, batching.sizes.get(bucket), asdict(batching.cost(bucket)), batching.supply(bucket, 0).slots]
            for bucket in sorted({bucket for pools in self.pools for bucket in pools})
        ]
        stages = [[stage.steps, self._uses_of(number)] for number, stage in enumerate(self.stages)]
        stages[-1][0] = None  # the last has all remaining steps, whatever its own number
        return _digest([batching.mix, batching.tolerance, rows, stages])

    def _uses_of(self, stage: int) -> list[list[Any]]:
        """Bucket, data set, size and uses of each pool in an epoch of a stage."""
        return [
            [pool.bucket.name, pool.dataset, len(pool.places), pool.uses]
            for pools in self.pools[stage].values()
            for pool in pools
        ]

    def state(self, step: int) -> dict[str, Any]:
        """The state for a checkpoint taken before `step`, in JSON's types, independent of the world size."""
        return {
            "data": self.data_fingerprint(self.stage_at(step)),
            "order": self.order_fingerprint,
            "origin": asdict(self.origin),
            "position": asdict(self.position(step)),
            "samples": self.sizes,
            "keys": self.fingerprint,
            "left_out": [list(gap) for gap in self._left_out],
        }

    def resume(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a checkpoint's state, before the first step is requested. Returns a message about changes, or None.

        With the same data, batching and curriculum the order is that of the stopped run. With another batching (or
        another world size, if the batching depends on it), or other stages before or after this one, exactly the remaining
        uses of the epoch follow, grouped differently. With other data, or in another stage, a new epoch begins. What is left out stays so.
        """
        position = SamplerState(**state["position"])
        before = ((epoch, name, start, end) for epoch, name, start, end in state["left_out"])
        self._left_out += [gap for gap in before if gap not in self._left_out]
        stage = self.stage_at(position.step)
        if state["data"] != self.data_fingerprint(stage):
            self.start_from(SamplerState(position.step, stage, position.epoch + 1))
            return f"the training data changed since the checkpoint ({self._changes(state['samples'], state['keys'])}): a new epoch begins"
        if state["order"] != self.order_fingerprint:
            self.start_from(replace(position, stage=stage))
            total = self.uses(stage)
            left = total - sum(position.used.values())
            return (
                f"batches or stages differ from those before the checkpoint: the {left:,} of {total:,} uses that "
                f"are left of epoch {position.epoch} are grouped differently"
            )
        self.start_from(SamplerState(**state["origin"]))
        return None

    def _changes(self, before: Mapping[str, int], keys: str) -> str:
        sizes = self.sizes
        labels = {bucket.name: str(bucket) for pools in self.pools for bucket in pools}
        changed = [
            f"bucket {labels.get(name, name)}: {before.get(name, 0):,} samples, now {sizes.get(name, 0):,}"
            for name in sorted({*before, *sizes})
            if before.get(name) != sizes.get(name)
        ]
        return "; ".join(changed[:4]) + (f" and {len(changed) - 4} buckets more" if len(changed) > 4 else "") or (
            "other samples, or other captions of them"
            if keys != self.fingerprint
            else "other repeats or shares of the sources, or another curriculum"
        )

    def _sorted_keys(self) -> Iterable[list[str]]:
        if isinstance(self.samples, SampleTable):
            return self.samples.sorted_keys()
        return [[sample.key for sample in self.samples]]


def _digest(content: Any) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:KEY_LENGTH]


def _in_order(samples: Sequence[S]) -> list[S]:
    """The samples, sorted by key. Raises ValueError if two have the same."""
    ordered = sorted(samples, key=lambda sample: sample.key)
    if any(before.key == sample.key for before, sample in itertools.pairwise(ordered)):
        raise ValueError("samples must have distinct keys; number_duplicates makes them so")
    return ordered


def _grouped(samples: Sequence[OrderedSample]) -> dict[tuple[ShapeClass, str], Array]:
    """The indices of the samples of each bucket and data set, in order."""
    places: dict[tuple[ShapeClass, str], list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault((sample.bucket, sample.dataset), []).append(place)
    return {group: np.array(places[group]) for group in sorted(places)}
