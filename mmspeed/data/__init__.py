"""The dataset cache, which preprocess writes and training reads, and the order of its samples in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspeed.lazy import first_use

if TYPE_CHECKING:
    from .cache.reader import DatasetCache
    from .cache.tables import Entry, Sample
    from .cache.writer import CacheWriter
    from .loading.first_epoch import FirstEpoch
    from .loading.loader import Loader
    from .loading.own_loop import webdataset
    from .sampling.order import Batching
    from .sampling.sampler import BatchSampler, SampleUse

__all__ = [
    "BatchSampler",
    "Batching",
    "CacheWriter",
    "DatasetCache",
    "Entry",
    "FirstEpoch",
    "Loader",
    "Sample",
    "SampleUse",
    "webdataset",
]

_HOME = {
    "BatchSampler": "sampling.sampler",
    "Batching": "sampling.order",
    "CacheWriter": "cache.writer",
    "DatasetCache": "cache.reader",
    "Entry": "cache.tables",
    "FirstEpoch": "loading.first_epoch",
    "Loader": "loading.loader",
    "Sample": "cache.tables",
    "SampleUse": "sampling.sampler",
    "webdataset": "loading.own_loop",
}


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOME, name)
