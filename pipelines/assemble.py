"""From a model without weights to all that a training step needs, and the way of one micro-batch through it.

Legend: B samples of a micro-batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.axes import Reader
from mmspeed.config import Config
from mmspeed.config.memory import parse_bytes
from mmspeed.device import Device, parse_dtype
from mmspeed.loop.ema import EMA
from mmspeed.loop.optim import AnyOptimizer, make_optimizer
from mmspeed.memory import Ways
from mmspeed.memory.keeping import make_keeping
from mmspeed.memory.tiered import TieredOptimizer
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.models import SoraDiT
from mmspeed.models.layers import own_part, set_parameter
from mmspeed.parallel import Strategy, TokenLayout, is_half, make_half, make_layout, parallelize, resolve_strategy
from mmspeed.pipelines.objective import Objective, make_objective
from mmspeed.protocol import Batch

LossFn = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Assembly:
    """What a run trains with."""

    model: nn.Module  # as `parallelize` made it
    optimizer: AnyOptimizer
    ema: EMA | None
    objective: Objective
    loss_fn: LossFn


@dataclass(frozen=True)
class Placement:
    """Which devices a run has, and what each is to it."""

    strategy: Strategy
    mesh: Mesh
    layout: TokenLayout
    reader: Reader  # the videos that this process reads: its group of those that compute a video together
    first: bool  # True for the one of the group that speaks for it


def place(config: Config, device: Device) -> Placement:
    """The config's layout over the processes of this run; a collective call. Raises UserError where it does not fit them."""
    parallel, world = config.parallel, dist.get_world_size()
    strategy = resolve_strategy(parallel.strategy, world)
    parallel.check_world(world)
    mesh = make_mesh(device, **parallel.sizes(sharded=strategy == "fsdp"))
    return Placement(strategy, mesh, make_layout(mesh, parallel), mesh.reader(), mesh.first_of_group)


def assemble(
    config: Config, bare: SoraDiT, placement: Placement, device: Device, choice: Sequence[Ways] | None = None
) -> Assembly:
    """Put a model that is on the meta device on its devices, with the weights of the config's seed; changed in place.

    `choice`: the ways of each block's spans that were chosen under a budget of memory.
    """
    keeping = make_keeping(config.memory, config.train.checkpointing, len(bare.blocks), device, choice)
    if config.memory.master != "parameters":  # float32 weights are the optimizer's
        make_half(bare)
    if placement.strategy != "fsdp":
        bare.to_empty(device=device.torch_device)
    model = parallelize(
        bare,
        placement.mesh,
        placement.strategy,
        layout=placement.layout,
        compute_dtype=parse_dtype(config.device.dtype),
        keeping=keeping,
        compile=config.train.compile,
    )
    if placement.strategy == "fsdp":  # memory only for this rank's shards
        bare.to_empty(device=device.torch_device)
    optimizer = make_optimizer(model, config.train, config.memory, device, placement.mesh)
    bare.init_weights(config.seed, weight_setter(model, optimizer))  # drawn by name (law 1)
    ema = make_ema(model, optimizer, config, device) if config.train.ema_decay is not None else None
    objective = make_objective(config.objective)
    return Assembly(model, optimizer, ema, objective, make_loss(objective, device))


def weight_setter(model: nn.Module, optimizer: AnyOptimizer) -> Callable[[nn.Parameter, Tensor], None]:
    """What brings a whole float32 value where a parameter's weights are: into the parameter, or to the optimizer."""
    if not isinstance(optimizer, TieredOptimizer) or not is_half(model):
        return set_parameter

    def put(parameter: nn.Parameter, value: Tensor) -> None:
        if optimizer.has(parameter):
            optimizer.set_master(parameter, own_part(parameter, value))
        else:  # it does not train
            set_parameter(parameter, value)

    return put


def make_ema(model: nn.Module, optimizer: AnyOptimizer, config: Config, device: Device) -> EMA:
    """The moving average of a model's float32 weights, which are the optimizer's where the parameters are bfloat16."""
    memory = config.memory
    assert config.train.ema_decay is not None
    host = device if memory.ema == "host" else None
    return EMA(model, config.train.ema_decay, optimizer, host, parse_bytes(memory.bucket))


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
