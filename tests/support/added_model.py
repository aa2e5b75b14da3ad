"""The model of docs/extending.md, from the code on that page as it stands, and a step of it on any layout beside one process."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mmspeed
from mmspeed import rng
from mmspeed.comm import Ledger
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.parallel import TokenLayout, make_layout, parallelize, sum_shared_gradients, uncrossed, unwrap
from mmspeed.parallel.boundaries.apply import root_of
from mmspeed.shapes import Bucket
from tests.support.foreign_steps import whole, worst
from tests.support.pages import blocks_under
from tests.support.runs import losses
from tests.support.toy_runs import toy_config, write_toy_cache

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


ALL_KEPT = {
    "tau": 0.0,
    "min_tokens": 1,
    "cluster_size": 8,
    "dense_first": 0,
    "dense_last": 0,
}  # sparse attention of every pair
WIDTH = 48
HIDDEN = 4 * WIDTH


@cache
def page() -> ModuleType:
    """The code under the page's heading "A model" as one module."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "added_model_page.py"
        file.write_text("\n".join(blocks_under(PAGE, "A model")), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """One layout and one kind of step. `batches`: (frames, height, width, caption tokens) of each micro-batch."""

    ulysses: int = 1
    ring: int = 1
    tp: int = 1
    strategy: Any = "none"
    keeping: BlockPolicies | None = None
    compile: Any = False
    sparse: str = ""
    text: int | None = None
    batches: tuple[tuple[int, int, int, int], ...] = ((4, 4, 6, 6),)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(ulysses=self.ulysses, ring=self.ring, tp=self.tp, shard_text=self.text)


class Meshes:
    """Meshes and layouts of this process, made once: process groups are slow to make."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Mesh, TokenLayout]] = {}

    def of(self, parallel: ParallelConfig) -> tuple[Mesh, TokenLayout]:
        key = parallel.model_dump_json()
        if key not in self.known:
            mesh = make_mesh(Device("cpu", 0), parallel.axis_sizes())
            self.known[key] = mesh, make_layout(mesh, parallel, Ledger())
        return self.known[key]


def perturbed(model: nn.Module) -> nn.Module:
    """The model with weights by their names, so that every process has the same and no zero hides anything."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                rng.normal(parameter.shape, 1, "page", name)
                * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
            )
    return model


def make_model() -> nn.Module:
    model: nn.Module = page().DiT(width=WIDTH, depth=2, heads=4, channels=3, text_width=10)
    return perturbed(model)


def loss_of(model: nn.Module, sizes: tuple[int, int, int, int]) -> Tensor:
    *latent, text = sizes
    x_BCThw = rng.normal((2, 3, *latent), 0, "latent", *sizes)
    target = rng.normal((2, 3, *latent), 0, "target", *sizes)
    mask_BL = torch.arange(text) < torch.tensor([[text], [text - 2]])
    out = model(x_BCThw, torch.tensor([0.3, 0.8]), rng.normal((2, text, 10), 0, "text", *sizes), mask_BL)
    return (out - target).square().mean()


def backward_of(model: nn.Module, case: Case, share: float) -> float:
    """All forwards, then all backwards: the loss."""
    losses = [loss_of(model, sizes) * share for sizes in case.batches]
    torch.stack(losses).sum().backward()
    return float(sum(loss.detach() for loss in losses)) / share


def step_of(case: Case, meshes: Meshes, make: Callable[[], nn.Module] = make_model) -> dict[str, Any]:
    """Loss, gradients, and counters that prove what ran: exchanges, uses of boundaries, numbers kept for backward, graphs."""
    mesh, layout = meshes.of(case.parallel)
    model, before, layers = make(), layout.ledger.copy(), {}

    def sparsify() -> None:
        layers.update(mmspeed.sparsify_model(unwrap(model), ALL_KEPT, grid=page().grid).layers)

    if case.sparse == "before":
        sparsify()
    model = parallelize(model, mesh, case.strategy, layout=layout, keeping=case.keeping, compile=case.compile)
    if case.sparse == "after":
        sparsify()
    kept: list[torch.Size] = []
    graphs = counters["stats"]["unique_graphs"]

    def keep(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = backward_of(model, case, 1 / layout.size)
    bare = unwrap(model)
    sum_shared_gradients(bare.parameters(), layout.tensor)
    grads = {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    if case.strategy == "none" and layout.whole.size > 1:
        for grad in grads.values():
            dist.all_reduce(grad, group=layout.whole.group)
    root = root_of(bare)
    assert root is not None
    return {
        "loss": loss,
        "grads": {name: whole(grad) for name, grad in grads.items()},
        "sent": {f"{kind} {axis}": n for (kind, axis), n in layout.ledger.since(before).bytes.items() if n},
        "calls": {f"{kind} {axis}": n for (kind, axis), n in layout.ledger.since(before).calls.items()},
        "uncrossed": uncrossed(bare),
        "uses": dict(root.boundary.sequences.uses),
        "kept": sum(shape.numel() for shape in kept),
        "hidden": sum(len(shape) == 3 and shape[-1] == HIDDEN // case.tp for shape in kept),  # (B, N, hidden) of an MLP
        "graphs": counters["stats"]["unique_graphs"] - graphs,
        "sparse": {name: dict(layer.counter) for name, layer in layers.items()},
    }


def compared(case: Case, meshes: Meshes, make: Callable[[], nn.Module] = make_model) -> dict[str, Any]:
    """How far a step of all processes is from that of one."""
    actual, alone = step_of(case, meshes, make), make()
    loss = backward_of(alone, case, 1.0)
    error, name = worst(actual["grads"], {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    return {**actual, "loss": abs(actual["loss"] - loss) / loss, "gradient": error, "name": name}


def train_on_toy_cache(folder: str, overrides: tuple[str, ...]) -> list[float]:
    """The losses of a run of the page's `train` on a small cache, on however many processes call this."""
    bucket = Bucket(5, 16, 32)
    config = toy_config(Path(folder), *overrides, bucket=bucket)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        write_toy_cache(config, bucket=bucket, sizes=(3, 2, 2, 4))
    if dist.is_initialized():
        dist.barrier()
    page().train(config)
    return losses(config)
