"""One step of a published video transformer under its plan, on any layout, beside the same step of one process in float32.

Used by `tests/ranks/test_foreign_plans.py`; one spawn of ranks computes many cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mmspeed
from mmspeed.axes import AxisSizes
from mmspeed.comm import Ledger
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.parallel import TokenLayout, make_layout, parallelize, sum_shared_gradients, uncrossed
from tests.support.video_transformers import loss_of, make_inputs, make_model

REGIONS = {"attention": "recompute", "cross_attention": "recompute", "mlp": "recompute"}
SPARSE: dict[str, Any] = {"min_tokens": 1, "cluster_size": 8, "dense_first": 0, "dense_last": 0}


@dataclass(frozen=True)
class Case:
    """One layout and one kind of step. `batches`: inputs of each micro-batch, whose forwards all come before the first backward."""

    model: str = "wan"
    ulysses: int = 1
    ring: int = 1
    tp: int = 1
    strategy: Any = "none"
    keeping: BlockPolicies | None = None
    compile: Any = False
    checkpointing: bool = False
    sparse: Any = ""
    tau: float = 0.0  # at 0 every key is kept, which is the dense model
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[dict[str, Any], ...] = ({},)


class Groups:
    """Meshes and layouts of this process, made once: process groups are slow to make."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Mesh, TokenLayout]] = {}

    def of(self, case: Case) -> tuple[Mesh, TokenLayout]:
        key = case.ulysses, case.ring, case.tp
        if key not in self.known:
            mesh = make_mesh(Device("cpu", 0), AxisSizes(ulysses=case.ulysses, ring=case.ring, tp=case.tp))
            parallel = ParallelConfig(ulysses=case.ulysses, ring=case.ring, tp=case.tp)
            self.known[key] = mesh, make_layout(mesh, parallel, Ledger())
        return self.known[key]


def inputs_of(case: Case) -> list[dict[str, Any]]:
    """The inputs of each micro-batch; image-to-video models get an encoded image and text of full length."""
    results = []
    for number, changes in enumerate(case.batches):
        inputs = make_inputs(case.model, seed=number + 1, **changes)
        if case.options.get("image_dim"):
            inputs["encoder_hidden_states"] = torch.randn(2, 512, 8, generator=torch.Generator().manual_seed(number))
            inputs["encoder_hidden_states_image"] = inputs["encoder_hidden_states"][:, :3] * 0.5
        results.append(inputs)
    return results


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def sparse_ways(case: Case, model: nn.Module) -> Iterator[None]:
    """Sparse attention, put there before the model is spread, or after."""
    if case.sparse == "before":
        make_sparse(case, model)
    yield
    if case.sparse == "after":
        make_sparse(case, model)


def make_sparse(case: Case, model: nn.Module) -> None:
    mmspeed.sparsify_model(model, SPARSE | {"tau": case.tau})


def backward_of(case: Case, model: nn.Module, share: float) -> float:
    """All forwards, then all backwards: the loss."""
    losses = [loss_of(model, inputs) * share for inputs in inputs_of(case)]
    for loss in losses:
        loss.backward()
    return float(sum(loss.detach() for loss in losses)) / share


def spread_step(case: Case, groups: Groups) -> dict[str, Any]:
    """Loss and gradients of a step over all processes, what was exchanged, and boundaries that were not crossed."""
    mesh, layout = groups.of(case)
    model = make_model(case.model, **case.options)
    if case.checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    declare_known_plan(model)
    before = layout.ledger.copy()
    with sparse_ways(case, model):
        model = parallelize(
            model, mesh, case.strategy, layout=layout, keeping=case.keeping, compile=case.compile
        )  # fmt: skip
    loss = backward_of(case, model, 1 / layout.size)
    sum_shared_gradients(model.parameters(), layout.tensor)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if case.strategy == "none" and layout.whole.size > 1:
        for grad in grads.values():
            dist.all_reduce(grad, group=layout.whole.group)
    return {
        "loss": loss,
        "grads": {name: whole(grad) for name, grad in grads.items()},
        "calls": {f"{kind} {axis}": n for (kind, axis), n in layout.ledger.since(before).calls.items()},
        "uncrossed": uncrossed(model),
        "sparse": dict(sum((layer.counter for layer in clustered_layers(model).values()), Counter())),
    }


def worst(actual: dict[str, Tensor], true: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a gradient relative to its largest entry, and whose it is; key biases have none but rounding."""
    assert actual.keys() == true.keys(), actual.keys() ^ true.keys()
    floor = 1e-3 * max(float(g.abs().max()) for g in true.values())
    return max((float((actual[n] - g).abs().max()) / max(float(g.abs().max()), floor), n) for n, g in true.items())


def compared(case: Case, groups: Groups) -> dict[str, Any]:
    """How far a step of all processes is from that of one."""
    actual = spread_step(case, groups)
    alone = make_model(case.model, **case.options)
    if case.tau > 0:
        make_sparse(case, alone)
    loss = backward_of(case, alone, 1.0)
    error, name = worst(actual["grads"], {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    return {
        "loss": abs(actual["loss"] - loss) / loss,
        "gradient": error,
        "name": name,
        "calls": actual["calls"],
        "uncrossed": actual["uncrossed"],
        "sparse": actual["sparse"],
        "grads": actual["grads"],
    }
