"""Attention sites with each structure, over Ulysses, ring and tensor parallelism, against the formula written out in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.parallel import Strategy, check_layout, parallelize, sum_shared_gradients, uncrossed
from mmspeed.protocols.plan import Structure
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole, worst
from tests.support.spawn import run_ranks
from tests.support.structured_toy import E, Shape, StructuredModel, WrittenOut

B, N = 2, 11
MASK = torch.ones(B, N, dtype=torch.bool)
MASK[0, 7:], MASK[1, :4] = False, False  # whole parts of some processes are hidden
DOCUMENTS = torch.tensor(
    [[0] * 4 + [1] * 5 + [2] * 2, [3] * 9 + [4] * 2]
)  # that go over the border between two processes


@dataclass(frozen=True)
class Kind:
    """A structure: what the model has, and what comes with each call."""

    structure: Structure = field(default_factory=Structure)
    shape: Shape = field(default_factory=Shape)
    inputs: dict[str, Tensor] = field(default_factory=dict)


KINDS = {
    "mask": Kind(inputs={"mask_BN": MASK}),
    "documents": Kind(inputs={"documents_BN": DOCUMENTS}),
    "grouped keys": Kind(shape=Shape(key_heads=2)),
    "all at once": Kind(Structure(causal=True, window=3), Shape(2, 8), {"mask_BN": MASK, "documents_BN": DOCUMENTS}),
}
LAYOUTS = {
    "ulysses": ParallelConfig(ulysses=2),
    "ring": ParallelConfig(ring=2),
    "tp": ParallelConfig(tp=2),
}
OVER_RING = {"documents": "documents", "all at once": "a window"}


def refusal(kind: str, parallel: ParallelConfig) -> str:
    """The refusal of a structure that does not go with a layout; nothing where it does."""
    if kind in OVER_RING and parallel.ring > 1:
        return f"blocks.0.attend (Attend): attention within {OVER_RING[kind]} is not computed over parallel.ring"
    key_heads = KINDS[kind].shape.key_heads
    if key_heads % parallel.tp:
        return f"parallel.tp {parallel.tp} does not divide the model's {key_heads} heads of keys: use one of 1"
    return ""


def loss_of(model: nn.Module, kind: Kind, dtype: torch.dtype = torch.float32) -> Tensor:
    x_BNE, goal_BNE = (rng.normal((B, N, E), 9, "structured", name).to(dtype) for name in ("x", "goal"))
    loss: Tensor = (model(x_BNE, **kind.inputs) - goal_BNE).square().mean()
    return loss


@cache
def truth(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, in float64."""
    kind = KINDS[name]
    model = StructuredModel(kind.shape, kind.structure, WrittenOut).double()
    loss = loss_of(model, kind, torch.float64)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def step_of(
    name: str, parallel: ParallelConfig, meshes: Meshes, keeping: BlockPolicies | None = None
) -> dict[str, Any]:
    mesh, layout = meshes.of(parallel)
    kind, before = KINDS[name], layout.ledger.copy()
    strategy: Strategy = "fsdp" if layout.tensor.size > 1 and layout.whole.size > 1 else "none"
    try:
        model = parallelize(StructuredModel(kind.shape, kind.structure), mesh, strategy, layout=layout, keeping=keeping)
        loss = loss_of(model, kind)
    except UserError as error:
        return {"refused": str(error)}
    (loss / layout.size).backward()
    sum_shared_gradients(model.parameters(), layout.tensor)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values() if strategy == "none" and layout.whole.size > 1 else ():
        dist.all_reduce(grad, group=layout.whole.group)
    true, of = truth(name)
    error, worst_name = worst({n: whole(g).double() for n, g in grads.items()}, of)
    calls = sum(layout.ledger.since(before).calls.values())
    return {
        "refused": "",
        "loss": abs(loss.item() - true) / true,
        "gradient": error,
        "name": worst_name,
        "calls": calls,
        "left": uncrossed(model),
    }


def computed() -> dict[tuple[str, str], dict[str, Any]]:
    meshes = Meshes()
    again = BlockPolicies.everywhere({"block": "recompute"})
    return {
        (kind, layout): step_of(kind, parallel, meshes, again if number % 2 else None)
        for number, kind in enumerate(KINDS)
        for layout, parallel in LAYOUTS.items()
    }


def hold(step: dict[str, Any], refused: str) -> None:
    if refused:
        assert refused in step["refused"], step
        return
    # float32 beside float64: sums of some tens of products
    assert step["refused"] == "" and step["loss"] <= 1e-5 and step["gradient"] <= 1e-5, step
    assert step["calls"] and step["left"] == [], step


def test_two_processes_compute_the_formula_or_refuse() -> None:
    for (kind, layout), step in run_ranks(computed, 2)[0].items():
        hold(step, refusal(kind, LAYOUTS[layout]))


def test_key_heads_that_do_not_divide_are_named() -> None:
    model = StructuredModel(Shape(key_heads=2), Structure())
    with pytest.raises(
        UserError, match=r"parallel\.tp 4 does not divide the model's 2 heads of keys: use one of 1, 2, and"
    ):
        check_layout(model, ParallelConfig(tp=4))
    check_layout(model, ParallelConfig(ulysses=4))
