"""Activation recomputation: keep a block's inputs, compute its activations again in backward.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by torch's own non-reentrant
checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmspeed.mixin import mix_in


class _Recomputed(nn.Module):
    """Mixed in before a block's own class: its forward is checkpointed wherever gradients are taken."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def recompute(block: nn.Module) -> None:
    """Make `block` recompute its activations in backward, in place."""
    mix_in(block, _Recomputed)
