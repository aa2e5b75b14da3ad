"""Activation recomputation: keep a block's inputs, compute its activations again in backward.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by torch's own non-reentrant
checkpoint.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Recomputed(nn.Module):
    """Mixed in before a block's own class: its forward is checkpointed wherever gradients are taken."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


@cache
def _recomputed(own: type[nn.Module]) -> type[nn.Module]:
    # one class for all blocks of a kind: torch.compile makes a graph for each class, and gives up silently after eight
    return type(f"Recomputed{own.__name__}", (_Recomputed, own), {})


def recompute(block: nn.Module) -> None:
    """Make `block` recompute its activations in backward, in place.

    The block's class is changed rather than wrapped, so that state-dict names stay, and rather than patched, so that a
    deep copy computes with its own parameters.
    """
    if not isinstance(block, _Recomputed):
        block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]
