"""The dataset cache, which preprocess writes and training reads, and the order in which its samples are trained on."""

from .cache import DatasetCache
from .compiled import compile_index
from .keys import canonical_json, entry_key, number_duplicates, sample_key
from .loader import Loader, Step, assemble, choose_text, draw_latent, first_frame, pad_texts, read_ahead
from .mapped import SampleTable
from .online import FirstEpoch, Made, Maker, Task
from .sampler import BatchSampler, Draw, count_present, micro_batches
from .tables import (
    SCHEMA_VERSION,
    SECTIONS,
    Entry,
    Rejection,
    Sample,
    read_info,
    read_samples,
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
    "FirstEpoch",
    "Loader",
    "Made",
    "Maker",
    "Rejection",
    "RepairReport",
    "Sample",
    "SampleTable",
    "Step",
    "Task",
    "assemble",
    "canonical_json",
    "choose_text",
    "compile_index",
    "count_present",
    "draw_latent",
    "entry_key",
    "first_frame",
    "latent_tensors",
    "micro_batches",
    "number_duplicates",
    "pad_texts",
    "read_ahead",
    "read_info",
    "read_samples",
    "repair",
    "sample_key",
    "text_tensors",
    "write_info",
    "write_rejects",
    "write_samples",
]
