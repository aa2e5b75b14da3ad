"""Config section of memory: what stays on the device during training, and where the rest is kept."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .inputs import Section

RegionName = str  # of a model's plan; `block` is the whole block
ActivationPolicy = Literal["save", "recompute", "selective", "offload", "offload_selective", "offload_recompute"]

# Only one of two nested regions can have a policy.
INSIDE: dict[str, tuple[str, ...]] = {
    "block": ("attention", "cross_attention", "mlp", "norm", "activation", "dispatch", "experts"),
    "attention": ("norm",),
    "cross_attention": ("norm",),
    "mlp": ("norm", "activation", "dispatch", "experts"),
}
SMALL = ("norm", "activation")  # a few operations before a matrix product
SMALL_WAYS = ("save", "recompute")

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_bytes(text: str | int) -> int:
    """Bytes of "60GiB", "512 MiB", "80GB", "1e9" or a whole number. Raises ValueError for anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]) or not math.isfinite(float(match[1]) * 1024**4):
        raise ValueError(f"'{text}' is not a number of bytes: write it like 60GiB, 512MiB or 80GB")
    number, unit = float(match[1]), match[2].upper()
    factor = _UNITS[unit] if match[3] else 1000 ** " KMGT".index(unit or " ")
    return int(number * factor)


class MemoryConfig(Section):
    """Device memory during training: every key trades memory for time, and none changes the result."""

    activation_policy: dict[RegionName, ActivationPolicy] = Field(
        default_factory=dict,
        description="Tensors kept for the backward pass of each region of a block. `save`: all that it needs (the default). `recompute`: the region's input; the rest is recomputed. `selective`: the results of matrix products and attention; only cheap operations are recomputed. `offload`: all of them, in host memory. `offload_selective`: the results of matrix products and attention, in host memory; the rest is recomputed. `offload_recompute`: the region's input, in host memory; the rest is recomputed. Regions: `block`, its branches `attention`, `cross_attention` and `mlp` (each with its norm), and `norm` and `activation` alone; within an `mlp` of experts `dispatch`, the tokens in the order of experts, and `experts`, their activation.",
    )
    budget: str | int | None = Field(
        None,
        description="Bytes of one device that training may use, such as `60GiB`: the policies of all regions of all blocks are then chosen from a measured step, to add the least time. Null: `activation_policy` sets them.",
    )
    fraction: float | None = Field(
        None, gt=0, le=1, description="Like `budget`, as a share of the device's memory (on a CPU, of the free memory)."
    )
    exchange_again: bool = Field(
        False,
        description="Repeat the exchanges between devices during recomputation, where an item or experts are split over several: less memory, more traffic. False: the received tensors are kept.",
    )
    keep_last: bool = Field(True, description="Do not offload the last block's tensors: backward needs them first.")
    offload_from: str | int = Field("1MiB", description="Smaller tensors are not offloaded.")
    master: Literal["parameters", "float32", "split", "host"] = Field(
        "parameters",
        description="Storage of the optimizer's float32 weights between steps. `parameters`: the parameters themselves are float32. Otherwise the parameters are bfloat16 (with `device.dtype: bfloat16`) and, beside them, `float32`: keeps a float32 copy; `split`: the 16 bits that bfloat16 lacks; `host`: those 16 bits, in host memory.",
    )
    states: Literal["device", "host"] = Field(
        "device",
        description="Storage of the optimizer's states (AdamW's moments) between steps; from `host` they are copied bucket by bucket while others are updated.",
    )
    bucket: str | int = Field(
        "64MiB", description="Float32 bytes of the weights that are updated at a time, with `master` or `states`."
    )
    ema: Literal["device", "host"] = Field("device", description="Storage of the moving average of the weights.")
    release_gradients: bool = Field(
        False,
        description="Update each bucket of weights in backward as soon as its gradients are complete, and free them. Needs `train.clip_norm: null` and one micro-batch a step.",
    )
    mlp_chunk: int | None = Field(
        None,
        ge=1,
        description="Tokens, over all samples of a micro-batch, that an MLP computes at a time; each part is recomputed in backward. Null: all at once.",
    )
    empty_cache: int | None = Field(
        None,
        ge=1,
        description="Steps after which the allocator's unused memory is given back to the device; null: only before and after a validation.",
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
            raise ValueError("is not a whole number of bytes: write it like 60GiB, 512MiB or 80GB")
        if parse_bytes(value) < 0:
            raise ValueError("a number of bytes cannot be negative")
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
            raise ValueError("budget and fraction both limit the memory of training: use one of them")
        if self.budget is not None and parse_bytes(self.budget) == 0:
            raise ValueError("budget 0 leaves no memory: write it like 60GiB, or null for no budget")
        if self.activation_policy and self.chooses:
            raise ValueError(
                "with a budget or a fraction the policies of regions are chosen: leave `activation_policy` out"
            )
        changed = [name for name, choice in self.activation_policy.items() if choice != "save"]
        for outer in changed:
            inner = next((name for name in INSIDE.get(outer, ()) if name in changed), None)
            if inner is not None:
                raise ValueError(f"activation_policy: {inner} is inside {outer}, so only one of them can have a policy")
        for name in changed:
            policy = self.activation_policy[name]
            if name in SMALL and policy not in SMALL_WAYS:
                raise ValueError(f"activation_policy: {name} can be {' or '.join(SMALL_WAYS)}, not {policy}")
        return self

    @property
    def chooses(self) -> bool:
        """True if a budget chooses the policies of regions."""
        return self.budget is not None or self.fraction is not None

    @property
    def tiered(self) -> bool:
        """True if the optimizer's weights or states are stored apart from the parameters between steps."""
        return self.master != "parameters" or self.states != "device" or self.release_gradients


def not_compiled(memory: MemoryConfig) -> str | None:
    """The part of a memory section that torch.compile cannot follow, in a sentence; None if there is none."""
    if memory.chooses:
        return "a budget chooses policies that torch.compile cannot follow"
    policies = {name: policy for name, policy in memory.activation_policy.items() if policy != "save"}
    if policies not in ({}, {"block": "recompute"}):
        return "with train.compile, `block: recompute` is the only policy beside `save`"
    if memory.mlp_chunk is not None:
        return "mlp_chunk is not for compiled blocks"
    return None


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
    """The conflict between a memory section and the rest of a config, in a sentence; None if there is none."""
    if compiles and (reason := not_compiled(memory)) is not None:
        return f"{reason}: leave train.compile or that setting out"
    policies = {name: policy for name, policy in memory.activation_policy.items() if policy != "save"}
    if memory.ema == "host" and not averages:
        return (
            "ema places the moving average of the weights, and train.ema_decay: null disables it: leave one of them out"
        )
    if memory.mlp_chunk is not None and memory.chooses:
        return "mlp_chunk recomputes the MLP part by part, and a budget chooses whether it is recomputed: leave mlp_chunk or the budget out"
    if (
        memory.mlp_chunk is not None
        and policies not in ({}, {"block": "recompute"})
        and {"mlp", "norm", "activation", "block"} & policies.keys()
    ):
        return "mlp_chunk recomputes the MLP part by part: it goes with `block: recompute` and with policies of the attentions alone"
    if memory.master != "parameters" and dtype != "bfloat16":
        return f"master: {memory.master} makes the parameters bfloat16, so it needs device.dtype: bfloat16, not {dtype}"
    if memory.release_gradients:
        if clips:
            return (
                "release_gradients updates weights before all gradients are complete, so it needs train.clip_norm: null"
            )
        if accumulates:
            return "release_gradients needs one micro-batch a step"
        if skips:
            return "release_gradients has already updated some weights when a later gradient is not finite, so no step can be skipped: it needs train.skip_non_finite: 0, and not train.divergence.action: skip"
        if strategy == "ddp" or tp > 1:
            return "release_gradients goes with parallel.strategy: none or fsdp, and without tp: otherwise gradients are complete only after backward"
    return None
