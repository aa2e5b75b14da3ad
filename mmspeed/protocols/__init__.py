"""All that the floors ask of each other. Structural types and plain data; nothing here computes."""

from .batch import Batch, Item, MicroBatches, NumberRule, Term, Terms
from .codecs import Posterior, TextEncoder, TextEntry, VideoCodec
from .data import BatchShape, Data, Divisors, Location, StepData
from .model import (
    CountsDenseFlops,
    DeclaresRoles,
    DiffusionModel,
    InitializesWeights,
    NamesRegions,
    PutWeight,
    Role,
    SpansBlock,
    TrainableModel,
    check_model,
)
from .shapes import ShapeClass
from .task import (
    CheckTask,
    LossFunction,
    MicroBatchSize,
    Models,
    RunPlace,
    StepUsage,
    Task,
    Update,
    Validation,
    Work,
)

__all__ = [
    "Batch",
    "BatchShape",
    "CheckTask",
    "CountsDenseFlops",
    "Data",
    "DeclaresRoles",
    "DiffusionModel",
    "Divisors",
    "InitializesWeights",
    "Item",
    "Location",
    "LossFunction",
    "MicroBatchSize",
    "MicroBatches",
    "Models",
    "NamesRegions",
    "NumberRule",
    "Posterior",
    "PutWeight",
    "Role",
    "RunPlace",
    "ShapeClass",
    "SpansBlock",
    "StepData",
    "StepUsage",
    "Task",
    "Term",
    "Terms",
    "TextEncoder",
    "TextEntry",
    "TrainableModel",
    "Update",
    "Validation",
    "VideoCodec",
    "Work",
    "check_model",
]
