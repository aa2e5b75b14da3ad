"""A toy of which 99 % is frozen, with state that is no parameter, for tests of what a run keeps; on one process and on several.

Legend: B batch, N tokens, E width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmspeed import rng
from mmspeed.axes import AxisSizes
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.config.memory import MemoryConfig
from mmspeed.config.sparse import SparseConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.initialize import own_part
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import TrainingState
from mmspeed.loop.checkpoint.state import states_to_save, weights_to_save
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.mesh import make_mesh
from mmspeed.parallel import make_half, parallelize, unwrap
from mmspeed.pipelines.run.assembly import part_setter
from mmspeed.protocols import StateRule
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, split

KEYS = [f"s{i}" for i in range(7)]  # of 8 slots: the last is a filler
CPU = Device("cpu", 0)
WIDTH, HIDDEN, RANK = 128, 4096, 40
BUCKET = 1 << 14


class AdaptedBlock(nn.Module):
    """A frozen MLP, beside it a product of two small matrices that train, and buffers that the run changes."""

    state_buffers: ClassVar[Mapping[str, StateRule]] = {"bias": "averaged", "count": "kept"}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.enter = nn.Linear(WIDTH, RANK, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.leave = nn.Linear(RANK, WIDTH, bias=False)
        self.attend = ClusteredAttention(SparseConfig())  # for its threshold alone
        self.register_buffer("bias", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)  # declared by nobody

    def forward(self, x_BNE: Tensor, t_B: Tensor) -> Tensor:
        frozen_BNE = self.down(torch.nn.functional.gelu(self.up(x_BNE) * (1 + t_B[:, None, None])))
        return x_BNE + frozen_BNE + self.leave(self.enter(x_BNE)) + self.bias


class AdaptedDiT(ToyDiT):
    """The toy around two such blocks. `base` seeds what is frozen, `seed` what trains."""

    def __init__(self, base: int = 0, seed: int = 0) -> None:
        super().__init__(width=WIDTH, depth=0)
        self.blocks.extend(AdaptedBlock() for _ in range(2))
        for name, parameter in self.named_parameters():
            parts = name.split(".")
            trains = parts[0] == "blocks" and parts[2] in ("enter", "leave")
            parameter.requires_grad_(trains)
            with torch.no_grad():
                parameter.copy_(rng.normal(parameter.shape, seed if trains else base, "adapted", name) * 0.03)


def share(model: nn.Module) -> float:
    """The part of the parameters' numbers that trains."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trains in sizes if trains) / sum(size for size, _ in sizes)


def state_of(
    strategy: Any = "none", replicate: int = 1, *, base: int = 0, seed: int = 0, **memory: Any
) -> TrainingState:
    """The toy in training, as `assemble` makes a model."""
    config = MemoryConfig(**({"bucket": BUCKET} | memory))
    mesh = make_mesh(CPU, AxisSizes(replicate, -1)) if dist.is_initialized() else None
    bare, values = AdaptedDiT(), AdaptedDiT(base, seed)
    half = config.master != "parameters"
    if half:
        make_half(bare)
    model = parallelize(bare, mesh, strategy, compute_dtype=torch.bfloat16 if half else torch.float32)
    optimizer = make_optimizer(model, TrainConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1), config, CPU)
    put = part_setter(model, optimizer)
    for parameter, value in zip(unwrap(model).parameters(), values.parameters(), strict=True):
        put(parameter, own_part(parameter, value.detach()))
    return TrainingState(model, optimizer, EMA(model, 0.9, optimizer, CPU if config.ema == "host" else None, BUCKET))


def steps(state: TrainingState, epochs: range, strategy: Any = "none") -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps, each of which changes the buffers too."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert state.optimizer is not None and state.ema is not None
    results = []
    for epoch in epochs:
        batches = split(KEYS, 8, rank, world, 8 // world, epoch)
        result = train_step(
            state.model, batches, flow_loss, state.optimizer,
            global_samples=7, clip_norm=1.0, strategy=strategy,
        )  # fmt: skip
        for number, block in enumerate(blocks(state.model)):
            block.bias += 0.01 * (epoch + 1) * (number + 1)
            block.count += 1
            block.attend.tau.fill_(epoch + 1.5 + number)
        state.ema.update(state.model)
        results.append((result.loss, result.grad_norm))
    return results


def blocks(model: nn.Module) -> list[Any]:
    """The blocks of the bare model."""
    return list(unwrap(model).blocks)  # type: ignore[arg-type]


def everything(state: TrainingState) -> dict[str, Tensor]:
    """What a checkpoint holds of a state, whole."""
    assert state.optimizer is not None and state.ema is not None
    results = {f"model.{n}": t for n, t in weights_to_save(state.model, state.optimizer).items()}
    results |= {f"optimizer.{n}": t for n, t in states_to_save(state.model, state.optimizer).items()}
    results |= {f"ema.{n}": t for n, t in state.ema.state_dict().items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in results.items()}


def state_bytes(state: TrainingState) -> dict[str, int]:
    """Bytes that this process has of moments and averages; of a model's buffers nothing."""
    assert state.optimizer is not None and state.ema is not None
    moments = [t for t in states_to_save(state.model, state.optimizer).values() if t.ndim]
    averages = list(state.ema.state_dict().values())
    own = [[t.to_local() if isinstance(t, DTensor) else t for t in some] for some in (moments, averages)]
    return {name: sum(t.nbytes for t in some) for name, some in zip(("optimizer", "average"), own, strict=True)}


def folder_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())
