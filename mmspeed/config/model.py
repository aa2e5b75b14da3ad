"""The section `model`: our own transformer by its sizes, or a published class by its repository (published.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .inputs import Section
from .published import PublishedModelConfig
from .sparse import SparseConfig


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


AnyModelConfig = Annotated[ModelConfig | PublishedModelConfig, Field(discriminator="kind")]
