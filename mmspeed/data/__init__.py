"""The dataset cache, which preprocess writes and training reads, and the order in which its samples are trained on."""

from .batch_sizes import (
    COUNTED_TEXT_TOKENS,
    MEASURED_NAME,
    Measured,
    Measurement,
    SampleCosts,
    make_batching,
    make_stages,
    sample_costs,
)
from .cache import DatasetCache
from .collate import (
    VideoCollate,
    assemble,
    choose_text,
    draw_latent,
    draw_noise,
    draw_quantiles,
    first_frame,
    pad_texts,
    video_batch,
)
from .compiled import compile_index
from .deal import Cost, Lot, deal, load_of
from .feed import read_ahead
from .forecast import Forecast, forecast
from .keys import canonical_json, entry_key, number_duplicates, sample_key
from .loader import Loader
from .mapped import SampleTable
from .online import FirstEpoch, Made, Maker, Task
from .order import Batching, Order, Place, Position, Stage
from .sampler import BatchSampler, Draw
from .shares import count_present, imbalance, share
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
    "COUNTED_TEXT_TOKENS",
    "MEASURED_NAME",
    "SCHEMA_VERSION",
    "SECTIONS",
    "BatchSampler",
    "Batching",
    "CacheWriter",
    "Cost",
    "DatasetCache",
    "Draw",
    "Entry",
    "FirstEpoch",
    "Forecast",
    "Loader",
    "Lot",
    "Made",
    "Maker",
    "Measured",
    "Measurement",
    "Order",
    "Place",
    "Position",
    "Rejection",
    "RepairReport",
    "Sample",
    "SampleCosts",
    "SampleTable",
    "Stage",
    "Task",
    "VideoCollate",
    "assemble",
    "canonical_json",
    "choose_text",
    "compile_index",
    "count_present",
    "deal",
    "draw_latent",
    "draw_noise",
    "draw_quantiles",
    "entry_key",
    "first_frame",
    "forecast",
    "imbalance",
    "latent_tensors",
    "load_of",
    "make_batching",
    "make_stages",
    "number_duplicates",
    "pad_texts",
    "read_ahead",
    "read_info",
    "read_samples",
    "repair",
    "sample_costs",
    "sample_key",
    "share",
    "text_tensors",
    "video_batch",
    "write_info",
    "write_rejects",
    "write_samples",
]
