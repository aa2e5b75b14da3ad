"""Weights of the stages of a process: how long they stay gathered (FSDP2), which gradients wait, and when gradients are summed over shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmspeed.compute.wgrad import Leaves, LeavingLinear, LeavingProjection, WeightGradients
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory.chunks import is_plain_linear
from mmspeed.mixin import mix_in
from mmspeed.protocols import blocks_of
from mmspeed.protocols.plan import PreparesInput
from mmspeed.torch_internals import hold_whole, is_fully_sharded, keep_sums, sum_over_shards

from .stages import Stages, shared_parameters
from .tensor import local, sum_together

LITTLE = 0.5  # of the weights of blocks; where gradients of less wait, that is warned of


def _leaving(module: nn.Module) -> type[Leaves] | None:
    """The class by which the gradients of a module's weights can wait; None where they cannot."""
    if isinstance(module, Leaves):
        return Leaves
    if not is_plain_linear(module):
        return None
    if isinstance(module, PreparesInput):
        return LeavingProjection
    return LeavingLinear if type(module).forward is nn.Linear.forward else None


def let_weights_wait(model: nn.Module) -> WeightGradients:
    """Let the gradients of the products in a model's blocks wait, in place; after everything else is done to it. Biases and norms do not."""
    gradients = WeightGradients()
    for _, block in blocks_of(model):
        for module in list(block.modules()):
            kind = _leaving(module)
            if kind is not None:
                leaving: Any = module if kind is Leaves else mix_in(module, kind, rename=False)
                leaving._gradients = gradients
    return gradients


def check_waiting(model: nn.Module, parallel: ParallelConfig) -> str | None:
    """A sentence where a schedule puts off gradients of weights and few of a whole model's can wait. Raises UserError where none can."""
    if not parallel.weights_wait:
        return None
    modules = [module for _, block in blocks_of(model) for module in block.modules()]
    trained = [(m, p) for m in modules for p in m.parameters(recurse=False) if p.requires_grad]
    waiting = sum(p.numel() for m, p in trained if p.ndim > 1 and _leaving(m) is not None)
    share = waiting / max(1, sum(p.numel() for _, p in trained))
    other = "1f1b" if parallel.virtual == 1 else "interleaved"
    if not share:
        raise UserError(
            f"parallel.schedule {parallel.schedule}: nothing that trains in the blocks of {type(model).__name__} is a linear layer whose "
            f"gradient could be computed later than that of its input: set parallel.schedule {other}"
        )
    return (
        f"parallel.schedule {parallel.schedule} computes only {share:.0%} of the gradients of weights in blocks later than those of inputs, "
        f"that is of linear layers: parallel.schedule {other} may take no longer"
        if share < LITTLE
        else None
    )


class StageWeights:
    """The weights of a model's stages on this process; None in place of a stage: those outside of blocks."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        held = iter(block for _, block in blocks_of(model))
        self.model, self.stages, self.is_sharded = model, stages, is_fully_sharded(model)
        self.blocks = {stage: [next(held) for _ in stages.bounds[stage]] for stage in stages.own}
        inside = {
            stage: [part for block in blocks for part in block.modules()] for stage, blocks in self.blocks.items()
        }
        in_blocks = {part for parts in inside.values() for part in parts}
        outside = [part for part in model.modules() if part not in in_blocks]
        self._sharded: dict[int | None, list[Any]] = {
            stage: list(filter(is_fully_sharded, parts)) for stage, parts in [*inside.items(), (None, outside)]
        }
        self._whole: set[int | None] = set()  # the stages whose weights stay gathered

    def synchronize(self, stage: int | None, on: bool) -> None:
        """Let gradients be summed over shards in the backward passes to come, or kept by this process."""
        for module in self._sharded[stage]:
            module.set_requires_gradient_sync(on, recurse=False)

    def keep_apart(self) -> None:
        """Let no backward pass sum gradients."""
        for stage in self._sharded:
            self.synchronize(stage, False)

    def stay_whole(self, stage: int | None, on: bool) -> None:
        """Let weights stay gathered behind the passes to come, or be freed."""
        if (stage in self._whole) == on:
            return
        (self._whole.add if on else self._whole.remove)(stage)
        for module in self._sharded[stage]:
            module.set_reshard_after_forward(not on, recurse=False)
            module.set_reshard_after_backward(not on, recurse=False)

    def release(self) -> None:
        """Free what stayed gathered."""
        for stage in list(self._whole):
            self.stay_whole(stage, False)
            for module in self._sharded[stage]:
                module.reshard()

    def hold(self) -> None:
        """Gather all weights for the whole step: a pass must not free what the other one of its pair uses."""
        if self.is_sharded:
            hold_whole(self.model)

    def come_next(self, stage: int) -> None:
        """Fetch a stage's last block at the begin of its backward pass; else it were that of the latest forward pass, whatever its stage."""
        block, model = self.blocks[stage][-1], self.model
        if is_fully_sharded(model) and is_fully_sharded(block):
            model.set_modules_to_backward_prefetch([block])

    def keep(self) -> None:
        """Keep the gradients that were computed outside of a backward pass, until they are summed over shards."""
        for stage in self.blocks:
            for module in self._sharded[stage]:
                keep_sums(module)

    def sum_over_shards(self, stage: int) -> None:
        """Sum the gradients of a stage's blocks over shards, outside of a backward pass."""
        for module in reversed(self._sharded[stage]):
            sum_over_shards(module)

    def sum_rest(self) -> None:
        """Sum the gradients of what is outside of blocks over shards, outside of a backward pass; the last of a step."""
        for module in reversed(self._sharded[None]):
            sum_over_shards(module, root=module is self.model)

    def sum_shared(self) -> None:
        """Sum, over stages, the gradients of parameters that several of them hold."""
        axis = self.stages.axis
        for pair, parameters in shared_parameters(self.model):
            shared = [p for p in parameters if p.requires_grad]
            for parameter in shared:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            group, size = self.stages.group, axis.size if pair is None else 2
            for sent in sum_together([local(p.grad) for p in shared if p.grad is not None], group, pair):
                axis.count("all_reduce", 2 * sent * (size - 1) // size)  # as in a ring algorithm
