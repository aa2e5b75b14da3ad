"""Let the gradients of a model's weights wait, and sum gradients over shards once they are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from mmspeed.compute.wgrad import Leaves, LeavingLinear, LeavingProjection, WeightGradients
from mmspeed.memory.chunks import is_plain_linear
from mmspeed.mixin import mix_in
from mmspeed.protocols import blocks_of
from mmspeed.protocols.plan import PreparesInput
from mmspeed.torch_internals import is_fully_sharded, keep_sums, sum_over_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def let_weights_wait(model: nn.Module) -> WeightGradients:
    """Let the gradients of the products in a model's blocks wait, in place; after everything else is done to it. Biases and norms do not."""
    gradients = WeightGradients()
    for _, block in blocks_of(model):
        for module in list(block.modules()):
            if isinstance(module, Leaves):
                module._gradients = gradients
            elif is_plain_linear(module) and isinstance(module, PreparesInput):
                mix_in(module, LeavingProjection, rename=False)._gradients = gradients
            elif is_plain_linear(module) and type(module).forward is nn.Linear.forward:
                mix_in(module, LeavingLinear, rename=False)._gradients = gradients
    return gradients


def keep_gradients(stage: list[nn.Module]) -> None:
    """Let the blocks of a stage keep the gradients that were computed outside of a backward pass, until they are summed over shards."""
    for module in _sharded(*stage):
        keep_sums(module)


def sum_gradients(stage: list[nn.Module]) -> None:
    """Sum the gradients of a stage's blocks over shards."""
    for module in _sharded(*reversed(stage)):
        sum_over_shards(module)


def _sharded(*parts: nn.Module) -> Iterator[FSDPModule]:
    for part in parts:
        yield from filter(is_fully_sharded, part.modules())
