"""The dataset cache, which preprocess writes and training reads, and the order in which its samples are trained on."""

from .cache import DatasetCache
from .keys import canonical_json, entry_key, number_duplicates, sample_key
from .loader import Loader, assemble, choose_text, draw_latent, pad_texts, read_ahead
from .sampler import BatchSampler, Draw, micro_batches
from .tables import (
    SCHEMA_VERSION,
    SECTIONS,
    Entry,
    Rejection,
    Sample,
    read_info,
    write_info,
    write_rejects,
    write_samples,
)
from .writer import CacheWriter, RepairReport, latent_tensors, repair, text_tensors

__all__ = [
    "SCHEMA_VERSION",
    "SECTIONS",
    "BatchSampler",
    "CacheWriter",
    "DatasetCache",
    "Draw",
    "Entry",
    "Loader",
    "Rejection",
    "RepairReport",
    "Sample",
    "assemble",
    "canonical_json",
    "choose_text",
    "draw_latent",
    "entry_key",
    "latent_tensors",
    "micro_batches",
    "number_duplicates",
    "pad_texts",
    "read_ahead",
    "read_info",
    "repair",
    "sample_key",
    "text_tensors",
    "write_info",
    "write_rejects",
    "write_samples",
]
