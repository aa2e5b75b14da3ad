"""The sections `model.adapter` and `model.base`: low-rank adapters that train beside a frozen model, and how that model is kept."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator

from .inputs import Section

Targets = Literal["attention", "attention+mlp", "blocks"]
WORDS: tuple[str, ...] = get_args(Targets)


class AdapterConfig(Section):
    """LoRA (Hu et al. 2021): a product of two low-rank matrices beside linear layers of a published model, which stays frozen."""

    kind: Literal["lora"] = Field(description="Kind of adapter.")
    rank: int = Field(32, ge=1, description="Rank of the two matrices.")
    alpha: float | None = Field(
        None,
        gt=0,
        description="Numerator of the adapter's scale, alpha / rank; null: the rank, so that the scale is 1.",
    )
    rslora: bool = Field(
        False, description="The scale is alpha / sqrt(rank) (rank-stabilised LoRA: Kalajdzievski 2023)."
    )
    targets: Targets | tuple[str, ...] = Field(
        "attention",
        description="Linear layers with an adapter. `attention`: those of attentions. `attention+mlp`: of MLPs too. `blocks`: all of the blocks. A list, such as `[to_q, to_v]`: those whose names end so; `*` stands for a part between dots.",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _known_targets(cls, targets: object) -> object:
        if isinstance(targets, str):
            known = targets in WORDS
        else:
            known = isinstance(targets, list | tuple) and bool(targets) and all(targets)
        if not known:
            raise ValueError(f"must be {', '.join(WORDS)} or a list of layers such as [to_q, to_v]")
        return targets

    @property
    def alpha_or_rank(self) -> float:
        """Alpha, which is the rank where the config sets none."""
        return float(self.rank) if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha_or_rank / (self.rank**0.5 if self.rslora else self.rank)


class BaseConfig(Section):
    """The frozen weights beside adapters."""

    dtype: Literal["float32", "bfloat16", "int8", "float8"] = Field(
        "float32",
        description="Number type of frozen weights. `int8`, `float8`: one byte for each weight of linear layers of blocks, and a float32 scale for each row; all else is bfloat16. Others than float32 need `device.dtype: bfloat16`.",
    )
    place: Literal["device", "host"] = Field(
        "device",
        description="Memory of the frozen weights of blocks. `host`: they lie in the host's (pinned) memory, and each block's come to the device ahead of its forward and backward (block swap).",
    )


def reason_against(adapter: AdapterConfig | None, base: BaseConfig, compute: str, strategy: str, tp: int) -> str | None:
    """The reason why a base cannot be kept so, for computing in the number type `compute` by a strategy and `tp` of `parallel`; None where it can."""
    if base.place == "host":
        if adapter is None:
            return "model.base.place host is for weights that stay frozen: set model.adapter, or leave it out"
        if strategy not in ("auto", "fsdp"):
            return f"model.base.place host goes with parallel.strategy auto or fsdp, not {strategy}"
    if base.dtype in ("int8", "float8") and tp > 1:
        return f"model.base.dtype {base.dtype} keeps layers that parallel.tp cannot split: use bfloat16, or parallel.ulysses or ring"
    if base.dtype == "float32":
        return None
    if adapter is None:
        return f"model.base.dtype {base.dtype} is for weights that stay frozen: set model.adapter, or leave it out"
    if compute != "bfloat16":
        return f"model.base.dtype {base.dtype} is computed with in bfloat16: set device.dtype: bfloat16, or model.base.dtype: float32"
    return None
