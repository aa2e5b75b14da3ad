"""From a model without weights to all that a training step needs, and the way of one micro-batch through it.

Legend: B samples of a micro-batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from mmspeed.config import Config
from mmspeed.device import Device, parse_dtype
from mmspeed.loop.ema import EMA
from mmspeed.loop.optim import make_optimizer
from mmspeed.models import SoraDiT
from mmspeed.parallel import Strategy, parallelize
from mmspeed.pipelines.objective import Objective, make_objective
from mmspeed.protocol import Batch

LossFn = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Assembly:
    """What a run trains with."""

    model: nn.Module  # as `parallelize` made it
    optimizer: Optimizer
    ema: EMA | None
    objective: Objective
    loss_fn: LossFn


def assemble(config: Config, bare: SoraDiT, mesh: DeviceMesh | None, strategy: Strategy, device: Device) -> Assembly:
    """Put a model that is on the meta device on its devices, with the weights of the config's seed; changed in place."""

    def fill() -> None:
        bare.to_empty(device=device.torch_device)
        bare.init_weights(config.seed)  # drawn by name (law 1)

    if strategy != "fsdp":
        fill()
    model = parallelize(
        bare,
        mesh,
        strategy,
        compute_dtype=parse_dtype(config.device.dtype),
        checkpointing=config.train.checkpointing,
        compile=config.train.compile,
    )
    if strategy == "fsdp":  # memory only for this rank's shards
        fill()
    optimizer = make_optimizer(model, config.train)
    ema = EMA(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    objective = make_objective(config.objective)
    return Assembly(model, optimizer, ema, objective, make_loss(objective, device))


def make_loss(objective: Objective, device: Device) -> LossFn:
    """The loss of each sample of a micro-batch (B,), float32, with the noise and the timestep that the loader drew for it."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        batch = batch.to(device.torch_device, torch.float32)
        assert batch.noise_BCThw is not None and batch.u_B is not None
        t_B = objective.time_from_quantile(batch.u_B).float()  # worked with on the CPU; the model gets it on its device
        x_BCThw, target_BCThw = objective.training_pair(batch.latents_BCThw, batch.noise_BCThw, t_B)
        prediction_BCThw = model(x_BCThw, device.to_device(t_B), batch.text_BLD, batch.text_mask_BL)
        return objective.sample_loss(prediction_BCThw, target_BCThw, t_B)

    return loss_fn
