"""The operators of language models, by name: their implementations, and the rule that says which one serves a call.

    operator               implementations, the eager twin last
    document_attention     fused (NPU), varlen (CUDA, half types), each (a fused call for each document), eager
    rms_norm               fused (NPU), torch, eager
    swiglu                 fused (NPU), lean (backward keeps its inputs alone), eager
    rotary                 fused (NPU), lean (backward keeps no activation), eager
    linear_cross_entropy   chunked (no logits in full), eager
    linear_log_sums        the same for a part of the vocabulary's rows: chunked, eager
    grouped_product        fused (NPU), grouped_mm (of torch), loop
    permute, combine       fused (NPU), gather (backward without atomic additions), eager

`counting` counts the calls of each implementation; `Operator.reasons` says why those that do not serve a call refuse it.
"""

from __future__ import annotations

from .operators.base import Implementation, Operator, counting
from .operators.cross_entropy import linear_cross_entropy, linear_log_sums
from .operators.document_attention import document_attention
from .operators.grouped import grouped_product
from .operators.norms import rms_norm
from .operators.permutation import combine, permute
from .operators.rotary import rotary
from .operators.swiglu import swiglu

__all__ = ["OPERATORS", "Implementation", "Operator", "counting"]

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        document_attention,
        rms_norm,
        swiglu,
        rotary,
        linear_cross_entropy,
        linear_log_sums,
        grouped_product,
        permute,
        combine,
    )
}
