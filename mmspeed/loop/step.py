"""One optimizer step: the same numbers on any number of ranks and for any cut into micro-batches (law 2).

Legend: B samples of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import Axis, all_gather_objects, all_reduce_sum
from mmspeed.errors import UserError
from mmspeed.parallel import Strategy, no_sync, sum_shared_gradients
from mmspeed.protocol import Batch

from .gradients import clip_gradients, non_finite
from .optim import AnyOptimizer
from .release import ReleasingOptimizer

LossFunction = Callable[[nn.Module, Batch], Tensor]  # -> loss_B, float32, one number a sample


class MicroBatches(Protocol):
    """A step's micro-batches on this rank: their number is known before they are; they are gone through once, in order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float  # mean over the real samples of all ranks
    grad_norm: float  # global, before clipping
    finite: bool  # False: nothing was updated
    bad: list[str] = field(default_factory=list)  # sources of the samples whose loss was not finite


def train_step(
    model: nn.Module,
    batches: MicroBatches,
    loss_fn: LossFunction,
    optimizer: AnyOptimizer,
    *,
    global_samples: int,
    world: int,
    clip_norm: float | None,
    strategy: Strategy,
    tensor: Axis | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepResult:
    """Forward and backward of this rank's micro-batches, then one update by the mean gradient of `global_samples`.

    `global_samples` is the number of real samples (weight 1) of all `world` ranks; all bring equally many
    micro-batches. Of a micro-batch nothing but its samples' losses and sources is kept when the next one is asked for.
    A loss or gradient that is not finite on any rank leaves parameters and optimizer untouched on all; with an optimizer that updates
    in backward it raises UserError.
    `tensor` is the tensor-parallel axis, where there is one. `group` is for small CPU collectives. The device is waited for once.
    """
    releasing = optimizer if isinstance(optimizer, ReleasingOptimizer) else None
    if releasing is not None:
        releasing.begin(len(batches))
    engine = world // (tensor.size if tensor is not None else 1)  # ranks that the engines average over
    losses: list[Tensor] = []
    sums: list[Tensor] = []
    sources: list[list[str]] = []
    for batch in batches:  # no enumerate: it would hold on to a batch while the next is waited for
        with no_sync(model, strategy, last=len(losses) == len(batches) - 1):
            loss_B = loss_fn(model, batch)
            # the engines average over ranks: times their number makes it the sum, over `global_samples` the mean
            loss_sum = (loss_B * batch.weights_B.to(loss_B.device)).sum()
            (loss_sum * (engine / global_samples)).backward()
        losses.append(loss_B.detach())
        sums.append(loss_sum.detach())
        sources.append(batch.sources)
        # a graph that has run still holds what its functions keep beside tensors, such as plans
        del batch, loss_B, loss_sum
    if tensor is not None:
        sum_shared_gradients(model.parameters(), tensor)
    loss_sum = torch.stack(sums).sum()
    if releasing is None:
        mine, grad_norm = torch.stack([loss_sum, clip_gradients(model, clip_norm)]).tolist()  # the wait for the device
    else:
        mine, grad_norm = loss_sum.item(), releasing.gradient_norm(group)
    broken = not (math.isfinite(mine) and math.isfinite(grad_norm))
    total, broken_ranks = all_reduce_sum([mine, float(broken)], group)
    bad: list[str] = []
    if broken_ranks:
        bad = sorted({name for names in all_gather_objects(non_finite(losses, sources), group) for name in names})
        if releasing is not None:
            raise _partly_applied(total / global_samples, grad_norm, bad)
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(total / global_samples, grad_norm, not broken_ranks, bad)


def _partly_applied(loss: float, grad_norm: float, bad: Sequence[str]) -> UserError:
    samples = ", ".join(bad[:8]) or "none alone (the gradient overflowed)"
    return UserError(
        f"loss {loss}, gradient norm {grad_norm}; samples with a non-finite loss: {samples}. With memory.release_gradients a part of this "
        "step was applied: lower train.lr or look at these samples, and start again, which goes on from the last checkpoint there is"
    )
