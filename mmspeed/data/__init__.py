"""The dataset cache, which preprocess writes and training reads, and the order of its samples in training."""

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
