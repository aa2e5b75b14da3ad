"""One training step of a model by a loss of samples, for tests of the loop and of parallelism.

Legend: B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import Axis
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer
from mmspeed.loop.runner import SequentialRunner
from mmspeed.loop.step import Learner, StepResult
from mmspeed.loop.step import train_step as take_step
from mmspeed.parallel import Strategy
from mmspeed.protocols import Batch, Models, Term, Terms, Update

SampleLoss = Callable[[nn.Module, Batch], Tensor]  # -> loss_B, float32


def update_of(loss_fn: SampleLoss) -> Update:
    """An update of the role "model" by one term."""

    def loss(models: Models, batch: Batch) -> Terms:
        return {"loss": Term(loss_fn(models["model"], batch), batch.weights_I)}

    return Update(loss)


def train_step(
    model: nn.Module,
    batches: Any,
    loss_fn: SampleLoss,
    optimizer: AnyOptimizer,
    *,
    global_samples: float,
    clip_norm: float | None,
    strategy: Strategy,
    tensor: Axis | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepResult:
    """A step by the mean over `global_samples` samples of all ranks."""
    learner = Learner(update_of(loss_fn), SequentialRunner([model], strategy), [optimizer])
    divisors = {"samples": float(global_samples)}
    return take_step({"model": model}, [learner], batches, divisors, clip_norm=clip_norm, tensor=tensor, group=group)
