"""Single training steps on the device, of made-up samples: as `mmspeed train` takes them, without a cache.

Legend: B samples, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mmspeed import comm, rng
from mmspeed.config import Config
from mmspeed.data import sample_costs
from mmspeed.data.batch_sizes import COUNTED_TEXT_TOKENS, Measurement
from mmspeed.device import Device, is_out_of_memory
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.loop.optim import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.memory import Ways, peak_bytes, resident_bytes
from mmspeed.memory.options import static_bytes
from mmspeed.memory.peak import local_bytes
from mmspeed.memory.tiered import TieredOptimizer
from mmspeed.models import SoraDiTConfig, build_model
from mmspeed.models.text import text_width
from mmspeed.models.vae import codec_geometry
from mmspeed.pipelines.assemble import assemble, place
from mmspeed.protocol import Batch
from mmspeed.shapes import Bucket, Strides

RATE = 1e-6  # learning rate of the steps: weights move, so that no product is of zeros only, and no loss runs away

Found = TypeVar("Found")


@dataclass(frozen=True)
class Inputs:
    """What a codec and a text encoder give."""

    channels: int
    strides: Strides
    text_width: int


class Trial:
    """Training steps of made-up samples of a config's model, on every device of the world alike."""

    def __init__(
        self,
        config: Config,
        device: Device,
        limit_bytes: int | None = None,
        *,
        choice: Sequence[Ways] | None = None,
        blocks: Sequence[int] | None = None,
        text_tokens: int = COUNTED_TEXT_TOKENS,
        given: Inputs | None = None,
    ) -> None:
        """Raises UserError for a bucket that fits neither codec nor model, and when the model alone is over the limit.

        choice: as for `assemble`. blocks: of the model's, only these. text_tokens: of the longest caption, as far as the config
        allows. given: None asks the config's codec and text encoder.
        """
        self.config, self.device = config, device
        self.world = dist.get_world_size()
        self.placement = place(config, device)
        self.strategy = self.placement.strategy
        if given is None:
            given = Inputs(*codec_geometry(config.vae), text_width(config.text))
        self.channels, self.strides, self.width = given.channels, given.strides, given.text_width
        self.text_tokens = min(text_tokens, config.text.max_tokens)
        self.bare = build_model(config.model, self.channels, self.width, device="meta")
        if blocks is not None:
            self.bare.blocks = nn.ModuleList(self.bare.blocks[block] for block in blocks)
        for bucket in config.buckets:
            latent_in(bucket, self.strides, self.bare.config)
        self.costs = sample_costs(self.bare, self.strides, config.text.max_tokens)
        least = self._least_bytes()
        if limit_bytes is not None and least > limit_bytes:
            raise does_not_fit(least, limit_bytes)
        self.parts = assemble(config, self.bare, self.placement, device, choice)
        set_learning_rate(self.parts.optimizer, RATE)

    @property
    def careful(self) -> bool:
        """Whether running out of memory would harm others: this host's programs, or the processes that wait for this one."""
        return self.device.kind == "cpu" or self.strategy != "none"

    @property
    def state_bytes(self) -> int:
        """What stays in memory between steps, once there was one: weights, optimizer's and average's state."""
        ema, optimizer = self.parts.ema, self.parts.optimizer
        averages = list(ema.tensors.values()) if ema is not None and not ema.on_host else []
        if isinstance(optimizer, TieredOptimizer):
            held = optimizer.device_bytes()
            return held["parameters"] + held["master"] + held["states"] + local_bytes(averages)
        return resident_bytes([*self.parts.model.parameters(), *averages], optimizer)

    def _least_bytes(self) -> int:
        """What weights, gradients, the optimizer's states and the average take on the device; 0 where they are sharded."""
        train, numbers = self.config.train, sum(p.numel() for p in self.bare.parameters())
        average = train.ema_decay is not None
        static = static_bytes(numbers, self.config.memory, average=average, optimizer=train.optimizer)
        return 0 if self.strategy == "fsdp" else static.between + static.gradients

    def run(self, bucket: Bucket, batch: int, micro_batches: int = 1) -> None:
        """One optimizer step of `batch` samples at a time on each device."""
        parts = self.parts
        result = train_step(
            parts.model,
            [self.batch(bucket, batch)] * micro_batches,
            parts.loss_fn,
            parts.optimizer,
            global_samples=batch * micro_batches * self.world,
            clip_norm=self.config.train.clip_norm,
            strategy=self.strategy,
            tensor=self.placement.layout.tensor,
        )
        if not result.finite:
            raise UserError(
                f"bucket {bucket}: the loss of random samples is {result.loss}; a step like that is not timed"
            )
        if parts.ema is not None:
            parts.ema.update(parts.model)

    def seconds(self, bucket: Bucket, batch: int, micro_batches: int = 1) -> float:
        """Time of one step, until the device has done it; of the slowest process."""
        comm.barrier()
        self.device.synchronize()
        start = time.perf_counter()
        self.run(bucket, batch, micro_batches)
        self.device.synchronize()
        return comm.all_reduce_max([time.perf_counter() - start])[0]

    def peak(self, bucket: Bucket, batch: int, micro_batches: int = 1) -> int:
        """Bytes in use at the peak of one step, on the device that has most."""
        peak = peak_bytes(self.device, self.state_bytes, lambda: self.run(bucket, batch, micro_batches))
        return int(comm.all_reduce_max([float(peak)])[0])

    def probe(self, bucket: Bucket, batch: int) -> Measurement | None:
        """A first measurement; None when memory ran out."""

        def both() -> Measurement:
            self.run(bucket, batch)  # compiles, chooses kernels, and makes the optimizer's state
            return Measurement(bucket, batch, self.seconds(bucket, batch), self.peak(bucket, batch))

        return self.attempt(both)

    def attempt(self, work: Callable[[], Found]) -> Found | None:
        """What `work` gives; None when memory ran out, and the model is as before. Raises UserError where it cannot be so."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.strategy != "none":
                raise UserError(
                    f"memory ran out in the middle of a step with parallel.strategy {self.strategy}: lower --memory-limit"
                ) from None
        self.parts.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.device.empty_cache()
        return None

    def batch(self, bucket: Bucket, batch: int) -> Batch:
        """Random latents with captions of half to all of the usual length, on the device."""
        seed, shape = self.config.seed, (self.channels, *self.strides.latent(bucket))
        lengths_B = torch.tensor([self.text_tokens - i % 4 * (self.text_tokens // 8) for i in range(batch)])

        def alike(name: str, *size: int) -> torch.Tensor:
            return rng.normal(size, seed, "profile", name).expand(batch, *size).contiguous()

        made = Batch(
            latents_BCThw=alike("latents", *shape),
            text_BLD=alike("text", self.text_tokens, self.width),
            text_mask_BL=torch.arange(self.text_tokens) < lengths_B[:, None],
            weights_B=torch.ones(batch),
            names=[("profile", 0, i) for i in range(batch)],
            bucket=bucket,
            sources=["profile"] * batch,
            noise_BCThw=alike("noise", *shape),
            u_B=(torch.arange(batch, dtype=torch.float64) + 0.5) / batch,
        )
        return made.to(self.device.torch_device, torch.float32)


def does_not_fit(state_bytes: int, limit_bytes: int) -> UserError:
    """What to say when nothing can be trained in the memory there is."""
    return UserError(
        f"not one sample of any bucket fits in {format_bytes(limit_bytes)}, of which the model with its optimizer takes "
        f"{format_bytes(state_bytes)}: set train.checkpointing: true, shard the model, make it smaller, or raise --memory-limit"
    )


def latent_in(bucket: Bucket, strides: Strides, model: SoraDiTConfig) -> tuple[int, int, int]:
    """The latent (T, h, w) of a bucket. Raises UserError for a bucket that fits neither codec nor model."""
    try:
        latent = strides.latent(bucket)
    except ValueError as error:
        raise UserError(f"bucket {bucket} does not fit the codec: {error}") from None
    try:
        model.grid(latent)
    except ValueError as error:
        raise UserError(f"bucket {bucket} does not fit the model: {error}") from None
    return latent
