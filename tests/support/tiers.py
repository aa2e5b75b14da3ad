"""The tiers of the optimizer on the toy model, for tests on one process and on several.

The toy's steps are of 8 slots, as in the other tests of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmspeed.axes import AxisSizes
from mmspeed.config.memory import MemoryConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.initialize import own_part
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import TrainingState
from mmspeed.loop.checkpoint.state import states_to_save, weights_to_save
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.step import StepResult
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.parallel import make_half, parallelize, unwrap
from mmspeed.pipelines.run.assembly import part_setter
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, split

KEYS = [f"s{i}" for i in range(7)]  # of 8 slots: the last is a filler
CPU = Device("cpu", 0)
TRAIN: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 0, "weight_decay": 0.1}
BUCKET = 1024  # bytes: several buckets, of one matrix or of some vectors

# plain first; those that follow have bfloat16 parameters
TIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"states": "host"},
    "float32": {"master": "float32"},
    "split": {"master": "split"},
    "host": {"master": "host", "states": "host", "ema": "host"},
}
HALF = ("float32", "split", "host")


def state_of(
    tier: str,
    strategy: Any = "none",
    seed: int = 0,
    replicate: int = 1,
    optimizer: str = "adamw",
    fixed: Sequence[str] = (),
    **memory: Any,
) -> TrainingState:
    """A toy in training in a tier, as `assemble` makes a model; its weights are those of the toy's seed. `fixed` do not train."""
    config = MemoryConfig(**({"bucket": BUCKET} | TIERS[tier] | memory))
    mesh: Mesh | None = make_mesh(CPU, AxisSizes(replicate, -1)) if dist.is_initialized() else None
    bare, values = ToyDiT(), ToyDiT(seed=seed)
    for name in fixed:
        bare.get_parameter(name).requires_grad_(False)
    half = config.master != "parameters"
    if half:
        make_half(bare)
    model = parallelize(bare, mesh, strategy, compute_dtype=torch.bfloat16 if half else torch.float32)
    tiered = make_optimizer(model, TrainConfig(optimizer=optimizer, **TRAIN), config, CPU, mesh)  # type: ignore[arg-type]
    put = part_setter(model, tiered)
    for parameter, value in zip(unwrap(model).parameters(), values.parameters(), strict=True):
        put(parameter, own_part(parameter, value.detach()))
    ema = EMA(model, 0.9, tiered, CPU if config.ema == "host" else None, BUCKET)
    return TrainingState(model, tiered, ema)


def steps(
    state: TrainingState, epochs: range, strategy: Any = "none", micro: int = 8, clip: float | None = 1.0
) -> list[StepResult]:
    """Training steps, with the average."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert state.optimizer is not None and state.ema is not None
    results = []
    for epoch in epochs:
        batches = split(KEYS, 8, rank, world, min(micro, 8 // world), epoch)
        result = train_step(
            state.model, batches, flow_loss, state.optimizer,
            global_samples=7, clip_norm=clip, strategy=strategy,
        )  # fmt: skip
        results.append(result)
        state.ema.update(state.model)
    return results


def losses(results: Sequence[StepResult]) -> list[float]:
    return [result.loss for result in results]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(state: TrainingState) -> dict[str, Tensor]:
    """Masters, moments and averages, whole, by the names of a checkpoint."""
    assert state.optimizer is not None and state.ema is not None
    results = {f"model.{n}": t for n, t in weights_to_save(state.model, state.optimizer).items()}
    results |= {f"optimizer.{n}": t for n, t in states_to_save(state.model, state.optimizer).items()}
    results |= {f"ema.{n}": t for n, t in state.ema.state_dict().items()}
    return {name: whole(tensor) for name, tensor in results.items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with, whole."""
    return {name: whole(p) for name, p in unwrap(model).named_parameters()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not there twice with the same bits and dtype."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    )
