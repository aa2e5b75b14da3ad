"""A webdataset pipeline over a cache: batches are planned for all nodes together, split by webdataset's own stages, and read.

Imported where a pipeline is made alone, as it needs the package webdataset. Legend: B batch, C channels, T h w latent, L caption tokens,
D text width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import webdataset
from webdataset.utils import pytorch_worker_info

from mmspeed.data.cache.index_reader import SampleTable
from mmspeed.data.cache.reader import DatasetCache
from mmspeed.data.cache.tables import Sample
from mmspeed.data.sampling.sampler import SampleUse
from mmspeed.rng import permutation
from mmspeed.shapes import Bucket

from .collate import assemble, choose_latent, choose_text

Planned = tuple[int, list[int]]  # an epoch, and places of samples of one bucket in the split


@dataclass(frozen=True)
class ReadSettings:
    """The draws that are made when samples are read."""

    seed: int
    caption_dropout: float
    noise: bool


class EpochPlan:
    """The batches of an epoch over all nodes, as webdataset's first stage: the same list on every node and worker."""

    def __init__(
        self,
        cache: DatasetCache,
        split: str,
        size_of: Callable[[Bucket], int],
        shuffle: bool,
        seed: int,
        drop_last: bool,
        equal: bool,
        world: int | None,
    ) -> None:
        samples = cache.split(split)
        lost = samples.lost()
        self.places = {
            bucket: places[~np.isin(places, lost)] if len(lost) else places
            for bucket, places in samples.by_bucket().items()
        }
        self.sizes = {bucket: size_of(bucket) for bucket in self.places}
        self.shuffle, self.seed, self.drop_last, self.equal, self.world = shuffle, seed, drop_last, equal, world
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that persist see it change

    @property
    def epoch(self) -> int:
        """The epoch whose order and draws are used."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, in all workers."""
        self._epoch.fill_(epoch)

    @property
    def nodes(self) -> int:
        """The nodes that the batches are split over."""
        return int(pytorch_worker_info()[1]) if self.world is None else self.world

    def count(self) -> int:
        """Batches of an epoch over all nodes."""
        whole = sum(self._batches(bucket) for bucket in self.places)
        return whole - whole % self.nodes if self.equal else whole

    def _batches(self, bucket: Bucket) -> int:
        held, size = len(self.places[bucket]), self.sizes[bucket]
        return held // size if self.drop_last else -(-held // size)

    def __call__(self) -> Iterator[Planned]:
        """Yield the epoch's batches in order."""
        epoch, buckets = self.epoch, list(self.places)
        ordered = self.places
        if self.shuffle:
            ordered = {
                bucket: places[permutation(len(places), self.seed, "sample_order", epoch, bucket.name)]
                for bucket, places in ordered.items()
            }
        ends = np.cumsum([self._batches(bucket) for bucket in buckets])
        total = int(ends[-1]) if buckets else 0
        turns = permutation(total, self.seed, "step_order", epoch) if self.shuffle else np.arange(total)
        for turn in turns[: self.count()].tolist():
            number = int(np.searchsorted(ends, turn, side="right"))
            bucket = buckets[number]
            start = (turn - (int(ends[number - 1]) if number else 0)) * self.sizes[bucket]
            yield epoch, ordered[bucket][start : start + self.sizes[bucket]].tolist()


class BatchReading:
    """Read planned batches of a split as dictionaries of tensors, with webdataset's `__key__`; picklable."""

    def __init__(self, cache: DatasetCache, split: str, settings: ReadSettings, batched: bool) -> None:
        self._cache: DatasetCache | None = cache
        self._samples: SampleTable | None = None
        self._opening = cache.__reduce__()
        self.split, self.settings, self.batched = split, settings, batched

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None, "_samples": None}

    @property
    def cache(self) -> DatasetCache:
        """The cache; a spawned worker opens it again at its first read, so that an error is reported there."""
        if self._cache is None:
            kind, arguments = self._opening
            self._cache = kind(*arguments)
        return self._cache

    def __call__(self, planned: Planned) -> dict[str, Any]:
        """Read a batch, or the one sample of it. Raises UserError for a missing or damaged entry."""
        epoch, places = planned
        cache, settings = self.cache, self.settings
        self._samples = samples = self._samples or cache.split(self.split)
        uses = [SampleUse(samples[place], epoch, 0) for place in places]
        batch = assemble(
            cache, [(use, 1.0) for use in uses], settings.seed, settings.caption_dropout, noise=settings.noise, fps=True
        )
        tensors = dict(batch.tensors)
        facts = [_facts(cache, use, settings) for use in uses]
        if not self.batched:
            del tensors["text_mask"]  # one caption has no padding
            return {"__key__": uses[0].sample.key, **{name: tensor[0] for name, tensor in tensors.items()}, **facts[0]}
        return {
            "__key__": [use.sample.key for use in uses],
            **tensors,
            **{name: [fact[name] for fact in facts] for name in facts[0]},
        }


def _facts(cache: DatasetCache, use: SampleUse[Sample], settings: ReadSettings) -> dict[str, Any]:
    """The metadata of a use of a sample: what its tensors were made from."""
    sample = use.sample
    latent = cache.entry(choose_latent(sample, settings.seed, use.name), "latents")
    text_key = choose_text(sample, settings.seed, use.name, settings.caption_dropout)
    text = cache.entry(cache.null_key, "null") if text_key is None else cache.entry(text_key, "texts")
    return {
        "caption": str(json.loads(text.meta).get("caption", "")),
        "source": sample.source,
        "dataset": sample.dataset,
        "bucket": (sample.bucket.frames, sample.bucket.height, sample.bucket.width),
        "frames": latent.frames,
    }


class CachePipeline(webdataset.DataPipeline, webdataset.FluidInterface):
    """A webdataset pipeline over a cache, with its methods: `map`, `select`, `compose` and so on add stages to a copy."""

    def __init__(self, plan: EpochPlan, reading: BatchReading, rank: int | None, world: int | None) -> None:
        nodes = webdataset.split_by_node if rank is None else partial(_every, rank=rank, world=world)
        super().__init__(plan, nodes, webdataset.split_by_worker, webdataset.map(reading))
        self.plan = plan
        self.rank = rank

    def set_epoch(self, epoch: int) -> CachePipeline:
        """Choose the epoch: its order and draws. Call it before each epoch, as that of torch's DistributedSampler."""
        self.plan.set_epoch(epoch)
        return self

    def count(self) -> int:
        """Batches (samples, without a batch size) that this node reads in an epoch."""
        rank = int(pytorch_worker_info()[0]) if self.rank is None else self.rank
        return len(range(rank, self.plan.count(), self.plan.nodes))


def _every(planned: Iterable[Planned], rank: int, world: int | None) -> Iterator[Planned]:
    """Split by a node's number that the caller gave."""
    yield from islice(planned, rank, None, world)
