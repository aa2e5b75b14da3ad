"""The norm of all gradients over all shards, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mmspeed.parallel import is_split


def clip_gradients(models: Sequence[nn.Module], clip_norm: float | None, scale: float | None = None) -> Tensor:
    """The norm of all gradients over all shards, a scalar on the device; those above `clip_norm` are scaled down.

    With `scale` gradients are multiplied by it too, and the norm is that of the products.
    """
    parameters = [p for model in models for p in model.parameters() if p.grad is not None]
    # weights that tensor parallelism splits lie on another mesh than the rest, and torch computes with one mesh at a time
    kinds = [kind for split in (False, True) if (kind := [p for p in parameters if is_split(p) == split])]
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = wholes[0] if len(wholes) == 1 else torch.stack(wholes).square().sum().sqrt()
    if scale is not None:
        norm = norm * scale
        factor = torch.full_like(norm, scale)
        if clip_norm is not None:
            factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for kind in kinds:
            torch._foreach_mul_([p.grad for p in kind if p.grad is not None], factor)
    elif clip_norm is not None:
        for kind in kinds:
            clip_grads_with_norm_(kind, clip_norm, norm)
    return norm
