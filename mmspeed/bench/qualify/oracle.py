"""Cases of attention, their truth in float64 on the CPU, and relative errors with a limit for each number type.

Legend: B batch, A heads, K heads of the keys, N queries, M keys, D head width, W width of the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.device import Device

from .rows import Outcome

# Relative errors, in the L2 norm. A rounding to n bits is wrong by up to 2^-n, probabilities, outputs and gradients are rounded once
# each, and gradients subtract numbers alike: four to eight roundings. Float32: sums of a thousand terms. A scale that is wrong by 3 % is
# wrong by about twice as much in the output, since scores are of size 2. Log-sum-exps of half types differ where means of keys are rounded.
LIMITS = {torch.float64: 1e-11, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LSE_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # absolute
SCORES = 2.0  # standard deviation of the scores
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of a call of attention."""

    name: str
    queries: int
    keys: int
    width: int = 64
    heads: int = 4
    key_heads: int = 4
    value_width: int | None = None
    masked: bool = False
    causal: bool = False

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def inputs(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        """q_BAND, k_BKMD, v_BKMW, dout_BANW of two samples on the CPU, and a mask in which sample 0 sees no key of its first half."""
        values = self.value_width or self.width
        shapes = {
            "q": (self.heads, self.queries, self.width),
            "k": (self.key_heads, self.keys, self.width),
            "v": (self.key_heads, self.keys, values),
            "dout": (self.heads, self.queries, values),
        }
        tensors = [rng.normal((2, *shape), 0, "qualify", name) for name, shape in shapes.items()]
        tensors[0] = SCORES * tensors[0]
        mask = None
        if self.masked:
            mask = rng.normal((2, self.keys), 0, "qualify", "mask") > -0.5
            mask[0, : self.keys // 2] = False
        return [x.to(dtype) for x in tensors], mask

    def on(self, device: Device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        """The same on a device."""
        tensors, mask = self.inputs(dtype)
        where = device.torch_device
        return [x.to(where) for x in tensors], None if mask is None else mask.to(where)


def attention_cases(small: bool) -> tuple[AttentionCase, ...]:
    """The cases of dense attention: lengths that fill no block, all widths of the models, masks, causal order, shared heads."""
    n, m = (67, 83) if small else (515, 643)
    return (
        AttentionCase("plain", n, m),
        AttentionCase("masked", n, m, masked=True),
        AttentionCase("causal", n, n, causal=True),
        AttentionCase("shared key heads", n, m, key_heads=2),
        AttentionCase("heads of 72", n, m, width=72),
        AttentionCase("heads of 128", n, m, width=128, heads=2, key_heads=2),
        AttentionCase("narrow values", n, m, value_width=32),
    )


@cache
def truth(case: AttentionCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of a case whose inputs are rounded to `dtype`: the formula in float64 on the CPU."""
    (*leaves, dout), mask = case.inputs(dtype)
    q, k, v = (x.double().requires_grad_() for x in leaves)
    times = case.heads // case.key_heads
    score_BANM = q @ k.repeat_interleave(times, 1).mT * case.scale
    if mask is not None:
        score_BANM = score_BANM.masked_fill(~mask[:, None, None], -torch.inf)
    if case.causal:
        later = torch.ones(case.queries, case.keys, dtype=torch.bool).triu_(1)
        score_BANM = score_BANM.masked_fill(later, -torch.inf)
    out = score_BANM.softmax(-1) @ v.repeat_interleave(times, 1)
    results = out, score_BANM.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), dout.double())
    return {name: x.detach() for name, x in zip(NAMES, results, strict=True)}


def relative_error(result: Tensor, right: Tensor) -> float:
    """|result - right| / |right| in the L2 norm, in float64 on the CPU; infinite for numbers that are not finite."""
    if result.shape != right.shape:
        return math.inf
    result, right = result.detach().cpu().double(), right.detach().cpu().double()
    error = float((result - right).norm() / right.norm().clamp(min=1e-300))
    return error if math.isfinite(error) else math.inf


def lse_error(lse: Tensor, right: Tensor) -> float:
    """The largest difference of a log-sum-exp; infinite where they differ in the rows that see no key."""
    lse, right = lse.detach().cpu().double(), right.detach().cpu().double()
    if lse.shape != right.shape or not torch.equal(lse == -torch.inf, right == -torch.inf):
        return math.inf
    seen = right != -torch.inf
    error = float((lse - right)[seen].abs().max()) if seen.any() else 0.0
    return error if math.isfinite(error) else math.inf


class Errors:
    """Errors of a kernel over its cases, each as a multiple of its limit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.cases: list[str] = []
        self.worst, self.error, self.where = -1.0, 0.0, ""

    def add(self, case: str, results: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Add the errors of a case's results, by their names."""
        self.cases.append(case)
        for name, result in results.items():
            if name == "lse":
                error, limit = lse_error(result, right[name]), LSE_LIMITS[self.dtype]
            else:
                error, limit = relative_error(result, right[name]), LIMITS[self.dtype]
            if error / limit > self.worst:
                self.worst, self.error, self.where = error / limit, error, f"{name} of {case}"

    def outcome(self, refusals: Sequence[str] = (), note: str = "") -> Outcome:
        """Passed where all are within their limits; absent, with a reason, where no case ran."""
        if not self.cases:
            return Outcome("absent", refusals[0] if refusals else "serves no case")
        figures = {"error": self.error, "of": self.where, "share_of_limit": self.worst, "cases": self.cases}
        text = (
            f"{len(self.cases)} cases, worst error {self.error:.1e} ({self.where}), {self.worst:.0%} of its limit{note}"
        )
        return Outcome("passed" if self.worst <= 1 else "failed", text, figures)


def short_name(dtype: torch.dtype) -> str:
    """A number type's name without its package."""
    return str(dtype).removeprefix("torch.")


def number_types(device: Device) -> tuple[torch.dtype, ...]:
    """The number types that kernels are checked in, the one of training first."""
    if device.kind == "cpu":
        return torch.float32, torch.bfloat16
    half = (torch.bfloat16, torch.float16) if device.supports_bf16() else (torch.float16,)
    return *half, torch.float32
