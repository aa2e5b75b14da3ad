"""The named sizes of SoraDiT in numbers, for tests that hold the code and docs/models.md together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmspeed.config.model import SIZES
from mmspeed.config.schema import ModelConfig
from mmspeed.models.sora.model import count_parameters, on_meta
from mmspeed.models.sora.sizes import resolve_config

LATENT = (13, 60, 106)  # 49 frames of 480 x 848 pixels through a codec of stride 4 x 8 x 8
CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 16, 256, 4096


@dataclass(frozen=True)
class SizeRow:
    """One line of the table of sizes."""

    name: str
    parameters: int
    gflops: float  # forward pass of one sample


def size_rows(arrangement: Literal["factorised", "full"] = "factorised") -> list[SizeRow]:
    """Parameters and forward GFLOPs of every size, built without memory for weights."""
    rows = []
    for name in SIZES:
        model = on_meta(resolve_config(ModelConfig(size=name, arrangement=arrangement), CHANNELS, TEXT_WIDTH))
        rows.append(SizeRow(name, count_parameters(model), model.flops(LATENT, TEXT_TOKENS) / 1e9))
    return rows
