"""What training keeps in a device's memory, and where the rest is."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .inputs import Section

RegionName = str  # of a model's plan; `block` is the whole of a block
ActivationPolicy = Literal["save", "recompute", "selective", "offload", "offload_selective", "recompute_output"]

# Of regions that lie in one another only one can have a policy.
INSIDE: dict[str, tuple[str, ...]] = {
    "block": ("attention", "cross_attention", "mlp", "norm", "activation"),
    "attention": ("norm",),
    "cross_attention": ("norm",),
    "mlp": ("norm", "activation"),
}
SMALL = ("norm", "activation")  # a few operations before a matrix product
SMALL_WAYS = ("save", "recompute", "recompute_output")

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_bytes(text: str | int) -> int:
    """Bytes of "60GiB", "512 MiB", "80GB", "1e9" or a whole number. Raises ValueError for anything else."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]) or not math.isfinite(float(found[1]) * 1024**4):
        raise ValueError(f"'{text}' is no number of bytes: write it like 60GiB, 512MiB or 80GB")
    number, unit = float(found[1]), found[2].upper()
    factor = _UNITS[unit] if found[3] else 1000 ** " KMGT".index(unit or " ")
    return int(number * factor)


class MemoryConfig(Section):
    """What training keeps in a device's memory: every key trades memory for time, and none changes what is learned."""

    activation_policy: dict[RegionName, ActivationPolicy] = Field(
        default_factory=dict,
        description="What is kept for backward of each region of a block. `save`: all that it needs (the default). `recompute`: the region's input, the rest is computed again. `selective`: the results of matrix products and attention; only what is cheap is computed again. `swap`: all of it, from the host's memory. `offload_selective`: results of matrix products and attention from the host's memory, the rest is computed again. `discard`: as `recompute`, by freeing the result (norm and activation only). Regions: `block`, its branches `attention`, `cross_attention` and `mlp` (each with its norm), and `norm` and `activation` alone.",
    )
    budget: str | int | None = Field(
        None,
        description="Bytes of one device that training may take, such as `60GiB`: the policies of all regions of all blocks are then chosen, from a measured step, so that least time is added. Null: `activation_policy` names them.",
    )
    fraction: float | None = Field(
        None, gt=0, le=1, description="As `budget`, in shares of the device's memory (on a CPU of what is free)."
    )
    exchange_again: bool = Field(
        False,
        description="Recomputation exchanges between devices again, where an item is split over several: less memory, more traffic. Else what came is kept.",
    )
    keep_last: bool = Field(
        True, description="The last block's tensors are not offloaded: backward needs them at once."
    )
    offload_from: str | int = Field("1MiB", description="Smaller tensors are not offloaded.")
    master: Literal["parameters", "float32", "split", "host"] = Field(
        "parameters",
        description="Where the optimizer's float32 weights are between steps. `parameters`: the parameters are float32. Else parameters are bfloat16 (with `device.dtype: bfloat16`), and `float32`: a copy beside them; `split`: the 16 bits that bfloat16 lacks; `host`: those, in the host's memory.",
    )
    states: Literal["device", "host"] = Field(
        "device",
        description="Where the optimizer's states (AdamW's moments) are between steps; from `host` they come bucket by bucket while others are updated.",
    )
    bucket: str | int = Field(
        "64MiB", description="Float32 bytes of the weights that are updated at a time, with `master` or `states`."
    )
    ema: Literal["device", "host"] = Field("device", description="Where the moving average of the weights is.")
    release_gradients: bool = Field(
        False,
        description="Update each bucket of weights in backward as soon as its gradients are there, and free them. Needs `train.clip_norm: null` and one micro-batch a step.",
    )
    mlp_chunk: int | None = Field(
        None,
        ge=1,
        description="Tokens of all samples of a micro-batch that an MLP computes at a time; each part is computed again in backward. Null: all at once.",
    )
    mlp_exact: bool = Field(
        True,
        description="With `mlp_chunk`, whether each number of the gradients is a sum over the terms of the whole MLP (9 matrix products in place of 6), or its weights' are sums over the parts (7 in place of 6). Whether the bits are the whole MLP's too is tried on the device before the first step, and written to the log.",
    )
    empty_cache: int | None = Field(
        None,
        ge=1,
        description="Steps after which the allocator's unused memory is given back to the device; null: never, but before and after a validation.",
    )
    snapshot: bool = Field(
        True, description="When a device's memory runs out, write the allocator's record into the run's folder."
    )

    @field_validator("budget", "offload_from", "bucket", mode="before")
    @classmethod
    def _bytes(cls, value: object, info: ValidationInfo) -> object:
        if value is None and info.field_name == "budget":
            return None
        if isinstance(value, float) and value.is_integer():  # YAML's 1.0e9
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError("is no whole number of bytes: write it like 60GiB, 512MiB or 80GB")
        if parse_bytes(value) < 0:
            raise ValueError("bytes are not negative")
        return value

    @field_validator("fraction", mode="before")
    @classmethod
    def _share(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("must be a share, such as 0.9")
        return value

    @model_validator(mode="after")
    def _fits(self) -> MemoryConfig:
        if self.budget is not None and self.fraction is not None:
            raise ValueError("budget and fraction both say how much memory training may take: use one of them")
        if self.budget is not None and parse_bytes(self.budget) == 0:
            raise ValueError("budget 0 leaves no memory: write it like 60GiB, or null for none")
        if self.activation_policy and self.chooses:
            raise ValueError(
                "with a budget or a fraction the policies of regions are chosen: leave `activation_policy` out"
            )
        told = [name for name, way in self.activation_policy.items() if way != "save"]
        for outer in told:
            inner = next((name for name in INSIDE.get(outer, ()) if name in told), None)
            if inner is not None:
                raise ValueError(f"activation_policy: {inner} lies in {outer}, so only one of them can have a policy")
        for name in told:
            policy = self.activation_policy[name]
            if name in SMALL and policy not in SMALL_WAYS:
                raise ValueError(f"activation_policy: {name} can be {' or '.join(SMALL_WAYS)}, not {policy}")
            if name not in SMALL and policy == "recompute_output":
                raise ValueError(
                    f"activation_policy: {name} cannot be recompute_output, which frees one result: norm and activation can"
                )
        return self

    @property
    def chooses(self) -> bool:
        """Whether the policies of regions are chosen under a budget."""
        return self.budget is not None or self.fraction is not None

    @property
    def tiered(self) -> bool:
        """Whether the optimizer's weights or states are elsewhere than the parameters between steps."""
        return self.master != "parameters" or self.states != "device" or self.release_gradients


def refused(
    memory: MemoryConfig,
    *,
    dtype: str,
    compiles: bool,
    clips: bool,
    accumulates: bool,
    strategy: str,
    tp: int,
    averages: bool,
    skips: bool = False,
) -> str | None:
    """Why a memory section does not go with the rest of a config, in a sentence; None where it does."""
    if compiles and memory.chooses:
        return "a budget chooses policies that torch.compile cannot follow: leave train.compile or the budget out"
    told = {name: way for name, way in memory.activation_policy.items() if way != "save"}
    if compiles and told not in ({}, {"block": "recompute"}):
        return "with train.compile, `block: recompute` is the only policy beside `save`: compiled blocks choose themselves what they keep"
    if memory.ema == "host" and not averages:
        return "ema says where the moving average of the weights is, and train.ema_decay: null makes none: leave one of them out"
    if memory.mlp_chunk is None and not memory.mlp_exact:
        return "mlp_exact says how an MLP in parts computes: set mlp_chunk, or leave mlp_exact out"
    if memory.mlp_chunk is not None and compiles:
        return "mlp_chunk is not for compiled blocks: leave train.compile or mlp_chunk out"
    if memory.mlp_chunk is not None and memory.chooses:
        return "mlp_chunk recomputes the MLP part by part, and a budget chooses whether it is recomputed: leave mlp_chunk or the budget out"
    if (
        memory.mlp_chunk is not None
        and told not in ({}, {"block": "recompute"})
        and {"mlp", "norm", "activation", "block"} & told.keys()
    ):
        return "mlp_chunk recomputes the MLP part by part: it goes with `block: recompute` and with policies of the attentions alone"
    if memory.master != "parameters" and dtype != "bfloat16":
        return f"master: {memory.master} makes the parameters bfloat16, so it needs device.dtype: bfloat16, not {dtype}"
    if memory.release_gradients:
        if clips:
            return "release_gradients updates weights before all gradients are there, so it needs train.clip_norm: null"
        if accumulates:
            return "release_gradients needs one micro-batch a step"
        if skips:
            return "release_gradients has updated some weights when a later gradient is not finite, so no step can be skipped: it needs train.skip_non_finite: 0"
        if strategy == "ddp" or tp > 1:
            return "release_gradients goes with parallel.strategy: none or fsdp, and without tp: elsewhere gradients are whole after backward only"
    return None
