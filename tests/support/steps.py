"""One training step of a model by a loss of samples, for tests of the loop and of parallelism.

Legend: B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
Loss = Callable[[Models, Batch], Terms]


def learner_of(
    models: Models, loss: Loss, optimizer: AnyOptimizer, strategy: Strategy = "none", update: Update | None = None
) -> Learner:
    """The learner of an update (None: of the role "model", at every step) by a loss of all models."""
    update = update or Update()
    runner = SequentialRunner(models[update.role], strategy)
    return Learner(update, runner, optimizer, lambda batch: batch, partial(loss, models))


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

    def loss(models: Models, batch: Batch) -> Terms:
        return {"loss": Term(loss_fn(models["model"], batch), batch.weights_I)}

    models, divisors = {"model": model}, {"samples": float(global_samples)}
    learner = learner_of(models, loss, optimizer, strategy)
    return take_step(models, [learner], batches, divisors, clip_norm=clip_norm, tensor=tensor, group=group)
