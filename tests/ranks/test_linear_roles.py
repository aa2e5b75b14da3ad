"""A toy with a layer of each role on two tensor-parallel processes; causal attention across processes; layers that cannot have a role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.parallel import parallelize, sum_shared_gradients, uncrossed
from mmspeed.protocols.plan import Linear, ModelPlan, Summed, declare_plan, plan_of
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole, worst
from tests.support.roles_toy import TokenModel, loss_of, tokens_of
from tests.support.spawn import run_ranks

RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})
CASES: dict[str, tuple[ParallelConfig, int, BlockPolicies | None]] = {
    "tp": (ParallelConfig(tp=2), 8, None),
    "tp, an odd length, recomputed": (ParallelConfig(tp=2), 7, RECOMPUTED),
    "ulysses": (ParallelConfig(ulysses=2), 7, None),
    "ring": (ParallelConfig(ring=2), 8, RECOMPUTED),
}


def step_of(parallel: ParallelConfig, length: int, keeping: BlockPolicies | None, meshes: Meshes) -> dict[str, Any]:
    mesh, layout = meshes.of(parallel)
    tokens_BN, alone = tokens_of(2, length), TokenModel()
    loss_of(alone, tokens_BN).backward()
    before = layout.ledger.copy()
    model = parallelize(TokenModel(), mesh, "none", layout=layout, keeping=keeping)
    loss = loss_of(model, tokens_BN)
    (loss / layout.size).backward()
    sum_shared_gradients(model.parameters(), layout.tensor)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if layout.whole.size > 1:
        for grad in grads.values():
            dist.all_reduce(grad, group=layout.whole.group)
    error, name = worst(
        {n: whole(g) for n, g in grads.items()}, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    )
    true = float(loss_of(alone, tokens_BN))
    calls = {f"{kind} {axis}": n for (kind, axis), n in layout.ledger.since(before).calls.items()}
    return {
        "loss": abs(float(loss) - true) / true,
        "gradient": error,
        "name": name,
        "calls": calls,
        "uncrossed": uncrossed(model),
    }


class Adapted(nn.Module):
    """A layer under an adapter of a kind of its own."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Doubled(nn.Linear):
    """A linear layer with more in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def with_role(name: str, linear: Linear) -> Callable[[TokenModel, ModelPlan], ModelPlan]:
    return lambda _, plan: replace(plan, linears={**plan.linears, name: linear})


def changed(name: str, make: Callable[[Any], nn.Module]) -> Callable[[TokenModel, ModelPlan], ModelPlan]:
    def change(model: TokenModel, plan: ModelPlan) -> ModelPlan:
        model.set_submodule(name, make(model.get_submodule(name)))
        return plan

    return change


def tied(model: TokenModel, plan: ModelPlan) -> ModelPlan:
    model.head.weight = model.embed.weight
    return plan


def summed(_: TokenModel, plan: ModelPlan) -> ModelPlan:
    return replace(plan, outputs={**plan.outputs, "blocks.*": {0: Summed("text", 1)}})


WRONG: dict[str, tuple[Callable[[TokenModel, ModelPlan], ModelPlan], str]] = {
    "no layer": (with_role("blocks.*.norm", Linear("column")), "(LayerNorm) has the role column in the plan and is no linear layer"),
    "two roles": (with_role("blocks.0.qkv", Linear("column", "text", dim=1)), "plan, linears: blocks.0.qkv (Linear) has two roles"),
    "no sequence": (with_role("blocks.*.out", Linear("row")), "name their sequence"),
    "summed twice": (summed, "blocks.0.out (Linear) has a sequence, and a module around it sums its results (Summed): keep one"),
    "two sequences": (with_role("head", Linear("vocabulary", ("text", "text"), dim=1)), "the role vocabulary, which takes one sequence"),
    "joined": (with_role("blocks.*.qkv", Linear("column", "text", dim=1, joined=(8, 8))), "the role column; `joined` is for row layers"),
    "a forward of its own": (changed("head", lambda _: Doubled(16, 10)), "(Doubled) has the role vocabulary and a forward of its own"),
    "an adapter": (changed("blocks.1.qkv", Adapted), "blocks.1.qkv (Adapted) has the role column, and its adapter is no LoRA"),
    "channels": (changed("head", lambda _: nn.Linear(16, 9)), "parallel.tp 2 does not divide the 9 channels of head"),
    "tied weights": (tied, "head (Linear) has a role in the plan and shares its weight with embed.weight"),
    "heads": (lambda _, plan: replace(plan, heads=3), "parallel.tp 2 does not divide the model's 3 heads"),
}  # fmt: skip


def refusal(make: Callable[[], Any]) -> str:
    try:
        make()
    except UserError as error:
        return str(error)
    return "nothing"


SPARE = {
    "spare_column": Linear("column"),
    "spare_entering": Linear("column", "text", dim=1),
    "spare_row": Linear("row", "text", dim=1),
    "spare_vocabulary": Linear("vocabulary", "text", dim=1),
}


def unused(meshes: Meshes) -> list[str]:
    """The names of layers with roles, and of a norm over all heads, that no forward calls."""
    mesh, layout = meshes.of(ParallelConfig(tp=2))
    model = TokenModel()
    for name in SPARE:
        model.add_module(name, nn.Linear(16, 16))
    model.add_module("spare_norm", nn.RMSNorm(16))
    plan = plan_of(model)
    assert plan is not None
    declare_plan(model, replace(plan, linears={**plan.linears, **SPARE}, channel_norms=("spare_norm",)))
    loss_of(parallelize(model, mesh, "none", layout=layout), tokens_of(2, 8))
    return uncrossed(model)


def computed() -> dict[str, Any]:
    meshes = Meshes()
    results: dict[str, Any] = {"unused": unused(meshes)}
    for name, case in CASES.items():
        results[name] = step_of(*case, meshes)
    mesh, layout = meshes.of(ParallelConfig(tp=2))
    for name, (change, _) in WRONG.items():
        model = TokenModel()
        plan = plan_of(model)
        assert plan is not None
        declare_plan(model, change(model, plan))
        results[name] = refusal(lambda m=model: parallelize(m, mesh, "none", layout=layout))  # type: ignore[misc]
    return results


@cache
def on_two() -> dict[str, Any]:
    return run_ranks(computed, 2)[0]


def test_two_processes_and_one_agree() -> None:
    for step in (on_two()[name] for name in CASES):
        assert step["loss"] <= 1e-5 and step["gradient"] <= 1e-5, step
        assert step["uncrossed"] == [] and step["calls"], step


def test_each_role_exchanges_what_it_needs() -> None:
    """Of two blocks: a gather and a sum of the attention's layers. Of the vocabulary: a gather of tokens, and an exchange of channels for tokens.

    Then the gather of all logits.
    """
    calls = on_two()["tp"]["calls"]
    assert calls["all_gather tp"] == 2 * 2 + 1 + 1, calls
    assert calls["all_to_all tp"] == 2, calls


def test_layers_with_roles_that_are_never_used_are_named() -> None:
    kinds = dict.fromkeys(SPARE, "Linear") | {"spare_norm": "RMSNorm"}
    assert on_two()["unused"] == [f"{name} ({kind})" for name, kind in kinds.items()]


def test_a_layer_that_cannot_have_a_role_is_refused_by_name() -> None:
    for name, (_, words) in WRONG.items():
        assert words in on_two()[name]
