"""Single training steps on the device, of synthetic items: like those of `mmspeed train`, without a cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.data.sampling.batch_sizes import Measurement
from mmspeed.device import Device, is_out_of_memory
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.loop.optimizers.learning_rate import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.memory import ActivationPolicies, peak_bytes, resident_bytes
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.memory.planning.options import static_bytes
from mmspeed.memory.planning.peak import local_bytes
from mmspeed.pipelines.run.assembly import assemble, place
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_measure import weights_of
from mmspeed.protocols import Batch, Models, ShapeClass, shape_words, trainable
from mmspeed.protocols.plan import keep_blocks

RATE = (
    1e-6  # learning rate of the steps: weights move, so that no product is of zeros only, and the loss does not diverge
)

Result = TypeVar("Result")


class SyntheticStep:
    """Training steps of synthetic items of a task's model, the same on every device of the world."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        device: Device,
        limit_bytes: int | None = None,
        *,
        choice: Sequence[ActivationPolicies] | None = None,
        blocks: Sequence[int] | None = None,
        text_tokens: int | None = None,
    ) -> None:
        """Build the model. Raises UserError for a shape class that does not fit the model, and for a model over the limit.

        config: the loop, memory and layout of the steps; the task's own config, or that with other choices. choice: as for
        `assemble`. blocks: only these blocks of the model. text_tokens: those of the longest text, None: the usual.
        """
        self.config, self.device, self.task = config, device, task
        self.world = dist.get_world_size()
        self.placement = place(config, device)
        self.strategy, self.place = self.placement.strategy, self.placement.at(device, config.run_dir)
        self.text_tokens = text_tokens
        bare = task.build()
        if blocks is not None:
            keep_blocks(bare[task.updates()[0].role], blocks)
        self.bare = bare
        task.domain.shapes()
        least = self._least_bytes()
        if limit_bytes is not None and least > limit_bytes:
            raise does_not_fit(least, limit_bytes)
        self.parts = assemble(config, task, bare, self.placement, device, choice, stand_ins=True)
        for optimizer in self.parts.optimizers.values():
            set_learning_rate(optimizer, RATE)

    @property
    def model(self) -> nn.Module:
        """The model that learns, without what engines wrap around it."""
        return learning_model(self.task, self.bare)

    @property
    def careful(self) -> bool:
        """True where running out of memory would harm others: this host's programs, or the processes that wait for this one."""
        return self.device.kind == "cpu" or self.strategy != "none"

    @property
    def state_bytes(self) -> int:
        """Bytes that stay in memory between steps, after the first one: weights, optimizer's and average's state."""
        return sum(self._state_bytes(role) for role in self.parts.roles)

    def _state_bytes(self, role: str) -> int:
        ema, optimizer = self.parts.averages.get(role), self.parts.optimizers[role]
        averages = list(ema.tensors.values()) if ema is not None and not ema.on_host else []
        if isinstance(optimizer, TieredOptimizer):
            device_bytes = optimizer.device_bytes()
            return device_bytes["parameters"] + device_bytes["master"] + device_bytes["states"] + local_bytes(averages)
        return resident_bytes([*self.parts.models[role].parameters(), *averages], optimizer)

    def _least_bytes(self) -> int:
        """Bytes of weights, gradients, the optimizer's states and the average on the device; 0 where they are sharded."""
        train = self.config.train
        numbers, frozen = map(sum, zip(*map(weights_of, self.bare.values()), strict=True))
        static = static_bytes(
            numbers,
            self.config.memory,
            average=train.ema_decay is not None,
            optimizer=train.optimizer,
            frozen=0 if self.config.host_base else frozen,
        )
        return 0 if self.strategy == "fsdp" else static.between + static.gradients

    def run(self, shape: ShapeClass, items: int, micro_batches: int = 1) -> None:
        """Take an optimizer step of `items` items at a time on each device."""
        parts, staged = self.parts, self.placement.mesh.staged
        batch = self.batch(shape, items)
        result = train_step(
            parts.models,
            parts.learners,
            _Read(partial(self.batch, shape, items), micro_batches) if staged else [batch] * micro_batches,
            self.task.domain.synthetic_divisors(batch, micro_batches * self.world),
            clip_norm=self.config.train.clip_norm,
            tensor=self.placement.layout.tensor,
            mesh=self.placement.mesh,
        )
        if not result.finite:
            raise UserError(
                f"bucket {shape_words(shape)}: the loss of random samples is {result.loss}; a step like that is not timed"
            )
        for role, ema in parts.averages.items():
            ema.update(parts.models[role])

    def seconds(self, shape: ShapeClass, batch: int, micro_batches: int = 1) -> float:
        """Time of one step, up to its completion on the device, of the slowest process."""
        comm.barrier()
        self.device.synchronize()
        start = time.perf_counter()
        self.run(shape, batch, micro_batches)
        self.device.synchronize()
        return comm.all_reduce_max([time.perf_counter() - start])[0]

    def peak(self, shape: ShapeClass, batch: int, micro_batches: int = 1) -> int:
        """Bytes in use at the peak of one step, on the device that has most of those with this one's stages."""
        peak = peak_bytes(self.device, self.state_bytes, lambda: self.run(shape, batch, micro_batches))
        return int(comm.all_reduce_max([float(peak)], self.placement.mesh.of_stage)[0])

    def probe(self, shape: ShapeClass, batch: int) -> Measurement | None:
        """A first measurement; None when memory ran out."""

        def both() -> Measurement:
            self.run(shape, batch)  # compiles, chooses kernels, and makes the optimizer's state
            return Measurement(shape, batch, self.seconds(shape, batch), self.peak(shape, batch))

        return self.attempt(both)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None when memory ran out and the model is as before. Raises UserError where that is impossible."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.strategy != "none":
                raise UserError(
                    f"memory ran out in the middle of a step with parallel.strategy {self.strategy}: lower --memory-limit"
                ) from None
        for learner in self.parts.learners:
            learner.forget_gradients()
        gc.collect()
        self.device.empty_cache()
        return None

    def batch(self, shape: ShapeClass, items: int) -> Batch:
        """A synthetic batch on the device."""
        return self.task.synthetic_batch(shape, items, self.place, self.text_tokens)


@dataclass(frozen=True)
class _Read:
    """Micro-batches that are made as they are read, as a loader's: a pipeline holds several at a time."""

    make: Callable[[], Batch]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return (self.make() for _ in range(self.count))


def learning_model(task: Task, models: Models) -> nn.Module:
    """The model that learns, of models by role. Raises UserError for one that lacks part of `TrainableModel`."""
    model = models[task.updates()[0].role]
    trainable(model, task.name)
    return model


def does_not_fit(state_bytes: int, limit_bytes: int) -> UserError:
    """The error for a model of which no sample fits into the memory."""
    return UserError(
        f"not one sample of any bucket fits in {format_bytes(limit_bytes)}, of which the model with its optimizer takes "
        f"{format_bytes(state_bytes)}: set "
        "memory.activation_policy: {block: recompute}, shard the model, make it smaller, or raise --memory-limit"
    )
