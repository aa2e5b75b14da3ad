"""Activation recomputation: keep a block's inputs, compute its activations again in backward.

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
        run, given = by_position(super().forward, args, kwargs)
        if not torch.is_grad_enabled() or (self._reentrant and not any(map(_takes_part, given))):
            return run(*given)
        return checkpoint(_RecomputedRun(run, self._exchange_again), *given, use_reentrant=self._reentrant)


def by_position(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of positional arguments alone that calls `run` as it is called, and its arguments.

    Torch's checkpoint keeps, offloads and gives gradients to tensors that it sees; the blocks of some models get theirs by name.
    """
    if not kwargs:
        return run, args
    names, count = tuple(kwargs), len(args)

    def named(*given: Any) -> Any:
        return run(*given[:count], **dict(zip(names, given[count:], strict=True)))

    return named, (*args, *kwargs.values())


class _RecomputedRun:
    """One forward pass, of which the second call decides as the first did and exchanges nothing."""

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
    """Without one such input the reentrant way would give the parameters no gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


@runtime_checkable
class _Checkpoints(Protocol):
    """A module of diffusers or transformers that checkpoints its blocks, by `_gradient_checkpointing_func`, where it is told to."""

    gradient_checkpointing: bool


class _ReplaysCheckpoints(nn.Module):
    """Mixed in before such a module's own class."""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any] | None:
        given: Callable[..., Any] | None = vars(self).get("_gradient_checkpointing_func")
        return None if given is None else lambda block, *args, **kwargs: given(replayed(block), *args, **kwargs)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, given: Callable[..., Any] | None) -> None:
        vars(self)["_gradient_checkpointing_func"] = given


def replay_checkpoints(model: nn.Module) -> None:
    """Let a model's own checkpoints (`enable_gradient_checkpointing`, before or after) decide and exchange once, in place."""
    for module in list(model.modules()):
        if isinstance(module, _Checkpoints):
            mix_in(module, _ReplaysCheckpoints, rename=False)  # diffusers writes the name into a checkpoint's config


def recompute(block: nn.Module, around_graphs: bool = False, exchange_again: bool = False) -> None:
    """Make `block` recompute its activations in backward, in place. What it got from exchanges between devices is kept.

    For any model, and for blocks that torch.compile makes graphs of; `regions.set_policies` knows more ways.

    around_graphs: what is recomputed runs as graphs of torch.compile. The second pass may find other graphs than the first, which
    keep other tensors, so torch's reentrant way is taken: it keeps none of the first pass and matches nothing. That one takes
    `backward()` rather than `torch.autograd.grad`, and gives no gradient to tensors within lists. exchange_again: keep nothing of
    exchanges and make them again.
    """
    recomputed = mix_in(block, _Recomputed)
    recomputed._reentrant, recomputed._exchange_again = around_graphs, exchange_again
