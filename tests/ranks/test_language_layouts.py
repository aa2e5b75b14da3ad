"""Decoders on several processes: loss and every gradient against one process in float32, with packed documents of odd lengths.

Tolerance: 1e-5 of a gradient's largest entry, since sums over processes and heads are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmspeed.axes import AxisSizes
from mmspeed.comm import Ledger
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import make_mesh
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import make_layout, parallelize, sum_shared_gradients, uncrossed, unwrap
from tests.support.covers import slow_but
from tests.support.foreign_steps import whole, worst
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
LENGTHS = (1, 17, 2, 9, 14)  # one document of a token; 43 tokens, which no group divides
RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})


@dataclass(frozen=True)
class Layout:
    """A shape's tiny twin on a layout."""

    shape: str
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    strategy: Any = "none"
    keeping: BlockPolicies | None = None
    rows: int = 1


TWO = {
    "qwen3, tp": Layout("qwen3-8b", tp=2),
    "qwen3 tied, ulysses": Layout("qwen3-0.6b", ulysses=2),
    "qwen3, fsdp, ulysses, recomputed": Layout("qwen3-8b", ulysses=2, strategy="fsdp", keeping=RECOMPUTED),
    "deepseek, tp": Layout("deepseek-v3", tp=2),
    "deepseek, ulysses": Layout("deepseek-v3", ulysses=2),
    "deepseek, fsdp, ulysses, recomputed": Layout("deepseek-v3", ulysses=2, strategy="fsdp", keeping=RECOMPUTED),
    "pangu, tp, recomputed": Layout("pangu-ultra-moe", tp=2, keeping=RECOMPUTED),
    "qwen3 experts, ulysses": Layout("qwen3-30b-a3b", ulysses=2),
    "qwen3, ring": Layout("qwen3-8b", ring=2),
    "deepseek, fsdp, ring, recomputed": Layout("deepseek-v3", ring=2, strategy="fsdp", keeping=RECOMPUTED),
    "qwen3 experts, ring": Layout("qwen3-30b-a3b", ring=2),
    "qwen3 experts, fsdp, tp": Layout("qwen3-30b-a3b", tp=2, strategy="fsdp"),
}
FEW = {"qwen3, tp", "qwen3 tied, ulysses", "deepseek, tp", "deepseek, fsdp, ulysses, recomputed"}
FOUR = {
    "deepseek, ring x ulysses": Layout("deepseek-v3", ring=2, ulysses=2),
    "qwen3, ring x tp, fsdp": Layout("qwen3-8b", ring=2, tp=2, strategy="fsdp"),
    "llama, ring": Layout("llama3-8b", ring=4, strategy="fsdp"),
    "deepseek, tp x ulysses, fsdp": Layout("deepseek-v3", tp=2, ulysses=2, strategy="fsdp"),
    "llama, ulysses": Layout("llama3-8b", ulysses=4, strategy="fsdp"),
}


def backward(model: torch.nn.Module, share: float) -> float:
    """The loss of a pack, further tokens and z-loss included, times a share; its gradients are added."""
    ids = torch.randint(0, 512, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    output = model(ids, bounds, next_tokens(ids, bounds))
    loss = output.loss_BN.mean() + 1e-3 * output.lse_BN.square().mean()
    for loss_BN, _ in output.further:
        loss = loss + 0.3 * loss_BN.mean()
    (loss * share).backward()
    return float(loss.detach())


def step(case: Layout) -> dict[str, Any]:
    parallel = ParallelConfig(tp=case.tp, ulysses=case.ulysses, ring=case.ring)
    mesh = make_mesh(Device("cpu", 0), AxisSizes(**parallel.sizes()))
    layout = make_layout(mesh, parallel, Ledger())
    settings = replace(tiny_twin(SHAPES[case.shape].settings), first_std=0.1)
    model = parallelize(Decoder(settings), mesh, case.strategy, layout=layout, keeping=case.keeping)
    loss = backward(model, 1 / layout.size)
    bare = unwrap(model)
    sum_shared_gradients(bare.parameters(), layout.tensor)
    grads = {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    if case.strategy == "none" and layout.whole.size > 1:
        for grad in grads.values():
            dist.all_reduce(grad, group=layout.whole.group)
    got = {name: whole(grad) for name, grad in grads.items()}
    alone = Decoder(settings)
    wanted = backward(alone, 1.0)
    error, name = worst(got, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    sent = {axis for (_, axis), count in layout.ledger.bytes.items() if count}
    return {
        "loss": abs(loss - wanted) / wanted,
        "gradient": error,
        "name": name,
        "sent": sent,
        "uncrossed": uncrossed(bare),
    }


def steps(cases: dict[str, Layout]) -> dict[str, Any]:
    return {name: step(case) for name, case in cases.items()}


@cache
def on_two(few: bool) -> dict[str, Any]:
    return run_ranks(steps, 2, {name: case for name, case in TWO.items() if (name in FEW) == few})[0]


def hold(case: Layout, result: dict[str, Any]) -> None:
    assert result["loss"] <= TOLERANCE and result["gradient"] <= TOLERANCE and not result["uncrossed"], result
    assert {axis for axis in ("tp", "ulysses", "ring") if vars(case)[axis] > 1} <= result["sent"]


@pytest.mark.parametrize("name", slow_but(TWO, FEW))
def test_two_processes_compute_what_one_does(name: str) -> None:
    hold(TWO[name], on_two(name in FEW)[name])


@pytest.mark.slow
def test_four_processes_compute_what_one_does() -> None:
    for name, result in run_ranks(steps, 4, FOUR)[0].items():
        hold(FOUR[name], result)
