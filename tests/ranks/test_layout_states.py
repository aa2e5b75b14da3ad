"""What layouts of devices must not change: first weights, checkpoints, samples.

One spawn of four ranks does all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmspeed import rng
from mmspeed.axes import AxisSizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.schema import FlowConfig
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.initialize import init_weights, set_parameter
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.models.sora.model import on_meta
from mmspeed.parallel import TokenLayout, make_layout, parallelize, sum_shared_gradients
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.diffusion.predictor import OwnPredictor
from mmspeed.pipelines.inference.generate import SampleSettings, generate_latents
from mmspeed.protocols import TextEntry
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow


WORLD, CPU = 4, Device("cpu", 0)
CFG = TrainConfig(lr=1e-2, warmup_steps=0)
# no width divides evenly: of 90 hidden units 45 a tensor-parallel rank, of these 23 and 22 a shard
ODD = SoraDiTConfig(width=36, depth=2, heads=2, latent_channels=3, text_width=10, adaln_rank=3, mlp_ratio=2.5)
# dp_replicate, dp_shard, ring, ulysses, tp
LAYOUTS = {
    "tp": (1, 2, 1, 1, 2),
    "tp in replicas": (2, 1, 1, 1, 2),
    "tp and ring": (1, 1, 2, 1, 2),
    "shards": (1, 4, 1, 1, 1),
    "ulysses": (1, 2, 1, 2, 1),
}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Layouts:
    """Meshes and layouts by name, made once."""

    def __init__(self) -> None:
        self.meshes: dict[str, tuple[Mesh, TokenLayout]] = {}
        for name, (replicate, shard, ring, ulysses, tp) in LAYOUTS.items():
            mesh = make_mesh(CPU, AxisSizes(replicate, shard, ring, ulysses, tp))
            self.meshes[name] = mesh, make_layout(mesh, ParallelConfig(ring=ring, ulysses=ulysses, tp=tp))

    def fresh(self, name: str, seed: int) -> tuple[nn.Module, TokenLayout]:
        """A model filled after it was spread, as `mmspeed train` does."""
        mesh, layout = self.meshes[name]
        model = parallelize(on_meta(ODD), mesh, "fsdp", layout=layout)
        model.to_empty(device="cpu")
        init_weights(model, seed)
        return model, layout


# -- first weights


def misplaced(model: nn.Module, name: str, layouts: Layouts) -> list[str]:
    """Parameters that are not those of one process bit for bit: put together, and the part of this rank, cut by hand."""
    truth, storage, wrong = dict(SoraDiT(ODD).named_parameters()), layouts.meshes[name][0].storage, []
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        part, axes = truth[key].detach(), parameter.device_mesh.mesh_dim_names or ()
        if not torch.equal(whole(parameter), part):
            wrong.append(key)
        if "tp" in axes:
            dim: int = parameter.placements[axes.index("tp")].dim  # type: ignore[attr-defined]
            part = part.chunk(storage["tp"].size(), dim)[storage["tp"].get_local_rank()]
        parts, place = part.chunk(storage["shard"].size()), storage["shard"].get_local_rank()
        if not torch.equal(parameter.to_local(), parts[place] if place < len(parts) else part[:0]):
            wrong.append(f"{key} here")
    return wrong


# -- checkpoints


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA) -> dict[str, Tensor]:
    results = {f"average {name}": whole(tensor) for name, tensor in ema.tensors.items()}
    for name, parameter in model.named_parameters():
        results[name] = whole(parameter)
        results |= {f"{key} {name}": whole(value) for key, value in optimizer.state[parameter].items()}
    return results


def written(name: str, layouts: Layouts, folder: Path) -> dict[str, Tensor]:
    """Two steps under a layout, and a checkpoint; what it must hold."""
    model, layout = layouts.fresh(name, 0)
    optimizer, ema = make_optimizer(model, CFG), EMA(model, 0.9)
    for step in range(2):
        out = model(
            rng.normal((1, 3, 3, 4, 4), 0, step), torch.tensor([0.5]), torch.ones(1, 4, 10), torch.ones(1, 4) > 0
        )
        (out - 1).square().mean().backward()
        sum_shared_gradients(model.parameters(), layout.tensor)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    CheckpointManager(folder).save(2, TrainingState(model, optimizer, ema, {}), blocking=True)
    return state_of(model, optimizer, ema)


def read(name: str, layouts: Layouts, folder: Path) -> dict[str, Tensor]:
    model, _ = layouts.fresh(name, 1)
    optimizer, ema = make_optimizer(model, CFG), EMA(model, 0.9)
    load(folder / "step-00000002", model, optimizer, ema)
    return state_of(model, optimizer, ema)


def changed_on_the_way(source: str, target: str, layouts: Layouts, folder: Path) -> list[str]:
    wanted = written(source, layouts, folder)
    actual = read(target, layouts, folder)
    return [key for key in wanted if key not in actual or not torch.equal(actual[key], wanted[key])]


# -- samples


def sampled(model: nn.Module, frames: int) -> Tensor:
    texts = [TextEntry(rng.normal((length, 10), 0, "text", length)) for length in (3, 5)]
    settings = SampleSettings(steps=3, guidance=2.0, sampler="euler", seed=1)
    shape, names = (3, frames, 4, 6), ["a", "b"]
    return generate_latents(
        model,
        make_objective(FlowConfig(kind="flow")),
        texts,
        TextEntry(torch.zeros(1, 10)),
        names,
        shape,
        settings,
        CPU,
        predictor=OwnPredictor(cast(Any, model)),
    )


def sample_gaps(layouts: Layouts) -> dict[str, float]:
    """How far videos and an image sampled by each layout are from those of one process."""
    results = {}
    for name in ("ulysses", "tp and ring"):
        model, _ = layouts.fresh(name, 0)
        one = SoraDiT(ODD)
        with torch.no_grad():
            for mine, (key, parameter) in zip(model.parameters(), one.named_parameters(), strict=True):
                parameter += 0.1 * rng.normal(parameter.shape, 0, key)
                set_parameter(mine, parameter.detach())
        for frames in (5, 1):
            right = sampled(one, frames)
            results[f"{name}, {frames} frames"] = (
                (sampled(model, frames) - right).abs().max() / right.abs().max()
            ).item()
    return results


def all_of_it(folder: str) -> dict[str, Any]:
    layouts = Layouts()
    results: dict[str, Any] = {
        "weights": {name: misplaced(layouts.fresh(name, 0)[0], name, layouts) for name in LAYOUTS}
    }
    ways = [("tp", "shards"), ("tp in replicas", "tp and ring"), ("shards", "tp")]
    results["ways"] = {way: changed_on_the_way(*way, layouts, Path(folder) / str(n)) for n, way in enumerate(ways)}
    results["samples"] = sample_gaps(layouts)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_of_it, WORLD, str(tmp_path_factory.mktemp("states")))


def test_first_weights_are_those_of_one_process_bit_for_bit(results: list[dict[str, Any]]) -> None:
    assert [result["weights"] for result in results] == [{name: [] for name in LAYOUTS}] * WORLD


def test_checkpoints_go_between_layouts_bit_for_bit(results: list[dict[str, Any]]) -> None:
    """Weights, averages, moments and step counts."""
    for result in results:
        assert not any(result["ways"].values()), result["ways"]


def test_a_group_samples_what_one_process_samples(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["samples"]) == 4 and max(result["samples"].values()) < 1e-5, result["samples"]
