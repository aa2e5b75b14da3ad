"""Recompute activations: keep a block's inputs, and compute its activations again in backward.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by torch's own checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmspeed.mixin import mix_in
from mmspeed.replay import replayed


class _Recomputed(nn.Module):
    """Mixed in before a block's own class: its forward is checkpointed wherever gradients are taken."""

    _reentrant = False
    _exchange_again = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, arguments = by_position(super().forward, args, kwargs)
        if not torch.is_grad_enabled() or (self._reentrant and not any(map(_takes_part, arguments))):
            return run(*arguments)
        return checkpoint(_RecomputedRun(run, self._exchange_again), *arguments, use_reentrant=self._reentrant)


def by_position(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of positional arguments alone that calls `run` with these arguments, and the arguments by position.

    Torch's checkpoint keeps, offloads and gives gradients to positional tensors only; the blocks of some models get theirs by name.
    """
    if not kwargs:
        return run, args
    names, count = tuple(kwargs), len(args)

    def named(*values: Any) -> Any:
        return run(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return named, (*args, *kwargs.values())


class _RecomputedRun:
    """A forward pass whose second call repeats the first one's decisions and exchanges nothing."""

    def __init__(self, run: Callable[..., Any], exchange_again: bool) -> None:
        self.run, self.exchange_again = run, exchange_again
        self.once: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph decides nothing and exchanges nothing
            return self.run(*args, **kwargs)
        if self.once is None:
            self.once = replayed(self.run, self.exchange_again)
        return self.once(*args, **kwargs)


def _takes_part(value: Any) -> bool:
    """True for a tensor that requires a gradient: without such an input the reentrant way gives the parameters none."""
    return isinstance(value, torch.Tensor) and value.requires_grad


@runtime_checkable
class _Checkpoints(Protocol):
    """A module of diffusers or transformers that checkpoints its blocks with `_gradient_checkpointing_func`, if that is enabled."""

    gradient_checkpointing: bool


class _ReplaysCheckpoints(nn.Module):
    """Mixed in before such a module's own class."""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any] | None:
        function: Callable[..., Any] | None = vars(self).get("_gradient_checkpointing_func")
        return None if function is None else lambda block, *args, **kwargs: function(replayed(block), *args, **kwargs)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable[..., Any] | None) -> None:
        vars(self)["_gradient_checkpointing_func"] = function


def replay_checkpoints(model: nn.Module) -> None:
    """Make a model's own checkpoints (`enable_gradient_checkpointing`, before or after) decide and exchange only once, in place."""
    for module in list(model.modules()):
        if isinstance(module, _Checkpoints):
            mix_in(module, _ReplaysCheckpoints, rename=False)  # diffusers writes the name into a checkpoint's config


def recompute(block: nn.Module, around_graphs: bool = False, exchange_again: bool = False) -> None:
    """Make `block` recompute its activations in backward, in place. Results of exchanges between devices are kept.

    It works for any model, and for blocks that torch.compile compiles; `regions.set_policies` has more ways.

    around_graphs: the recomputed part runs as graphs of torch.compile. The second pass may use other graphs than the first, which
    keep other tensors, so torch's reentrant way is used: it keeps none of the first pass and matches nothing. It needs `backward()`
    rather than `torch.autograd.grad`, and gives no gradient to tensors within lists. exchange_again: keep no results of exchanges, and
    exchange again.
    """
    recomputed = mix_in(block, _Recomputed)
    recomputed._reentrant, recomputed._exchange_again = around_graphs, exchange_again
