"""Gradient release: weights are updated in backward, and their gradients freed (Lv et al., 2023: LOMO; here bucket by bucket).

The gradients of all buckets are never in memory together.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn

from mmspeed.comm import all_reduce_sum
from mmspeed.errors import UserError
from mmspeed.loop.gradients import squared_norm
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.mesh import Mesh


class ReleasingOptimizer(TieredOptimizer):
    """A tiered optimizer that updates a bucket as soon as backward has computed all its gradients.

    For each step: `begin`, backward, `gradient_norm`, `step` (for parameters without a gradient in backward). The first gradient that is
    not finite stops the updates on this process; earlier updates remain. `mesh`: the processes that share the parameters.
    """

    def __init__(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mesh = mesh
        self._bucket_of: dict[nn.Parameter, int] = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._begun = self._broken = False
        self._waiting: Counter[int] = Counter()
        self._squares = 0.0
        for parameter in self._bucket_of:
            # the sharding engine calls these when it has reduced a gradient, on its stream, which it waits for at the end
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, micro_batches: int) -> None:
        """Prepare for a step's backward. Raises UserError for several micro-batches: gradients are complete after the last one only."""
        if micro_batches != 1:
            raise UserError(
                f"memory.release_gradients needs one micro-batch a step, and this step has {micro_batches} on a device: "
                "lower train.batch_size, or leave train.micro_batch_size and batching.slots out"
            )
        self._waiting = Counter({number: len(bucket) for number, bucket in enumerate(self.buckets)})
        self._begun, self._broken, self._squares = True, False, 0.0

    def gradient_norm(self, group: dist.ProcessGroup | None = None) -> float:
        """The norm of all gradients of the step over all shards. All processes call it, after backward, before `step`."""
        for number in self._left():  # a parameter without a part in this step's loss may leave a bucket waiting
            self._squares += squared_norm(self.buckets[number], self._mesh)
        return math.sqrt(all_reduce_sum([self._squares], group)[0])

    def step(self) -> None:
        """Update the buckets that are still waiting; without `begin`, all of them."""
        if not self._begun:
            super().step()
            return
        for number in self._left():
            self.step_bucket(number)
        self.finish()
        self._begun = False

    def _left(self) -> list[int]:
        return [number for number, missing in self._waiting.items() if missing]

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._begun:
            return
        number = self._bucket_of[parameter]
        self._waiting[number] -= 1
        if self._waiting[number]:
            return
        # waits for the device: a gradient that is not finite must not update anything
        squares = squared_norm(self.buckets[number], self._mesh)
        self._squares += squares
        self._broken = self._broken or not math.isfinite(squares)
        if not self._broken:
            self.step_bucket(number)
        for other in self.buckets[number]:
            other.grad = None
