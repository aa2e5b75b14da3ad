"""The dataset cache, which preprocess writes and training reads, and the order in which its samples are trained on."""

from .cache.reader import DatasetCache
from .cache.tables import Entry, Sample
from .cache.writer import CacheWriter
from .loading.first_epoch import FirstEpoch
from .loading.loader import Loader
from .sampling.order import Batching
from .sampling.sampler import BatchSampler, Draw

__all__ = [
    "BatchSampler",
    "Batching",
    "CacheWriter",
    "DatasetCache",
    "Draw",
    "Entry",
    "FirstEpoch",
    "Loader",
    "Sample",
]
