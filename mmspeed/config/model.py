"""The section `model`: our own transformer by its sizes, or a published class by its repository (published.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mmspeed.errors import nearest

from .inputs import Section
from .published import PublishedModelConfig
from .sparse import SparseConfig

# "S/2" and the like are named as in DiT: the size and the spatial patch. Fused attention takes heads of 64 or 128 as they are and pads
# XL/2's of 72 to 128; XL/2-128 has as many parameters in heads of 128, which split over 2, 4 or 8 devices.
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"width": 64, "depth": 2, "heads": 4, "adaln_rank": 8},
    "tiny": {"width": 192, "depth": 6, "heads": 6, "adaln_rank": 16},
    "S/2": {"width": 384, "depth": 12, "heads": 6, "adaln_rank": 64},
    "B/2": {"width": 768, "depth": 12, "heads": 12, "adaln_rank": 128},
    "L/2": {"width": 1024, "depth": 24, "heads": 16, "adaln_rank": 256},
    "XL/2": {"width": 1152, "depth": 28, "heads": 16, "adaln_rank": 256},
    "XL/2-128": {"width": 1024, "depth": 35, "heads": 8, "adaln_rank": 256},
    "3B": {"width": 2048, "depth": 42, "heads": 16, "adaln_rank": 256},
    "8B": {"width": 4096, "depth": 28, "heads": 32, "adaln_rank": 256},
}


class ModelConfig(Section):
    """SoraDiT, trained from its beginning. `size` names a preset; every other field that is set overrides it."""

    kind: Literal["sora"] = Field("sora", description="SoraDiT, our own diffusion transformer.")
    size: str = Field("tiny", description="Named size: see `mmspeed.models.SIZES`.")
    arrangement: Literal["factorised", "full"] = Field(
        "factorised",
        description="`factorised`: spatial and temporal blocks in turn. `full`: every block attends over all tokens.",
    )
    width: int | None = Field(None, ge=16, description="Model width E.")
    depth: int | None = Field(None, ge=1, description="Number of blocks.")
    heads: int | None = Field(None, ge=1, description="Attention heads; width / heads must be even and at least 12.")
    mlp_ratio: float | None = Field(None, gt=0, description="Hidden width of the MLP as a multiple of the model width.")
    patch: tuple[int, int, int] | None = Field(None, description="Latent frames, rows and columns that make one token.")
    adaln_rank: int | None = Field(None, ge=1, description="Rank of each block's own part of the timestep modulation.")
    sparse: SparseConfig | None = Field(None, description="Sparse self-attention; null: all attention is dense.")
    unrecorded = ("control",)
    control: bool = Field(
        False, description="The model is given a control video, the role `control` of the data, as further channels."
    )

    @field_validator("size")
    @classmethod
    def _known(cls, size: str) -> str:
        if size not in SIZES:
            raise ValueError(f"{size!r} is not a known size{nearest(size, list(SIZES))} (known: {', '.join(SIZES)})")
        return size


AnyModelConfig = Annotated[ModelConfig | PublishedModelConfig, Field(discriminator="kind")]
