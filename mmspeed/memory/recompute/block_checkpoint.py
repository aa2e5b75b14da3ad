"""Activation recomputation: keep a block's inputs, compute its activations again in backward.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by torch's own checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmspeed.mixin import mix_in
from mmspeed.replay import recorded_modules, replayed


class _Recomputed(nn.Module):
    """Mixed in before a block's own class: its forward is checkpointed wherever gradients are taken."""

    _reentrant = False
    _decides = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled() or (self._reentrant and not any(map(_takes_part, args))):
            return run(*args, **kwargs)
        if self._decides:
            run = replayed(run)
        return checkpoint(run, *args, use_reentrant=self._reentrant, **kwargs)


def _takes_part(value: Any) -> bool:
    """Without one such input the reentrant way would give the parameters no gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def recompute(block: nn.Module, around_graphs: bool = False) -> None:
    """Make `block` recompute its activations in backward, in place.

    For any model, and for blocks that torch.compile makes graphs of; `spans.set_ways` knows more ways, and keeps what was exchanged.

    `around_graphs`: what is recomputed runs as graphs of torch.compile. The second pass may find other graphs than the first, which
    keep other tensors, so torch's reentrant way is taken: it keeps none of the first pass and matches nothing. That one takes
    positional arguments alone, and `backward()` rather than `torch.autograd.grad`.
    """
    recomputed = mix_in(block, _Recomputed)
    recomputed._reentrant = around_graphs
    recomputed._decides = bool(recorded_modules(block))
