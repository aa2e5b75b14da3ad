"""Experts over processes in a model that is no decoder, on FSDP2; and what is refused. Tolerance: 1e-5 of a gradient's largest entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.models.language.experts import Experts
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import parallelize
from mmspeed.parallel.experts import spread_experts
from mmspeed.parallel.tensor import local
from mmspeed.protocols.plan import ModelPlan, declare_plan, plan_of
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole, worst
from tests.support.roles_toy import TokenModel, loss_of, tokens_of
from tests.support.spawn import run_ranks

WIDTH, EXPERTS = 16, 8
RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})
CASES: dict[str, tuple[ParallelConfig, BlockPolicies | None, bool]] = {
    "ep 2 x edp 2": (ParallelConfig(ep=2), None, False),
    "ep of four, recomputed": (ParallelConfig(ep=4), RECOMPUTED, False),
    "compiled": (ParallelConfig(ep=4, ep_inner=2), None, True),
    "compiled, recomputed": (ParallelConfig(ep=2), RECOMPUTED, True),
}


def step_of(parallel: ParallelConfig, keeping: BlockPolicies | None, compiled: bool, meshes: Meshes) -> dict[str, Any]:
    """A step on documents of each process's own, of one token on one of them, beside all of them on one process."""
    mesh, layout = meshes.of(parallel)
    alone, world = TokenModel(), dist.get_world_size()
    parts = [tokens_of(1, 2 + 5 * rank) for rank in range(world)]
    for part in parts:
        loss_of(alone, part).backward()
    torch._dynamo.reset()
    counters.clear()
    model = parallelize(TokenModel(), mesh, "fsdp", layout=layout, keeping=keeping, compile=compiled and "eager")
    before = layout.ledger.copy()
    reads, plain = list[None](), torch.Tensor.tolist
    with patch.object(torch.Tensor, "tolist", lambda tensor: reads.append(None) or plain(tensor)):
        loss_of(model, parts[dist.get_rank()]).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    error, name = worst(
        {n: whole(g) for n, g in grads.items()}, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    )
    held = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if "experts" in name}  # type: ignore[attr-defined]
    calls = {kind: n for (kind, _), n in layout.ledger.since(before).calls.items()}
    return {"gradient": error, "name": name, "missing": alone.state_dict().keys() - grads.keys(), "held": held, "calls": calls, "reads": len(reads), "breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}  # fmt: skip


class Layer(nn.Module):
    """The experts of a Qwen3-MoE by themselves."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        twin = tiny_twin(SHAPES["qwen3-30b-a3b"].settings).experts
        assert twin is not None
        self.experts = Experts(WIDTH, replace(twin, num_experts=experts))
        for name, p in self.named_parameters():
            p.data.copy_(rng.normal(p.shape, 3, name) * 0.1)
        declare_plan(self, ModelPlan(blocks=(), experts={"experts": {}}))


def beside_transformers(meshes: Meshes) -> float:
    """The greatest distance of a layer's outputs and gradients, of tokens, gates and experts, from those of transformers' AllToAllEP."""
    mesh, layout = meshes.of(ParallelConfig(ep=4))
    assert mesh.expert is not None
    ours, rank, width = Layer(EXPERTS), dist.get_rank(), Layer(EXPERTS).experts.down_proj.shape[2]
    settings = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=width)
    settings._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(settings)
    for name, whole_GOI in ours.experts.named_parameters():
        theirs.register_parameter(name, nn.Parameter(whole_GOI.detach().chunk(4)[rank].clone()))
    theirs.num_experts = EXPERTS // 4
    peer = AllToAllEP(theirs, mesh.expert["ep"], mesh.expert["etp"])
    spread_experts(ours, mesh, layout)
    tokens = 11 * rank  # none on the first
    x_TE = rng.normal((tokens, WIDTH), 4, "tokens", rank)
    gates_TK, expert_TK = rng.normal((tokens, EXPERTS), 4, "gates", rank).softmax(-1).topk(2)
    sides = []
    for layer in (lambda x, g, e: ours.experts(x, g, e), lambda x, g, e: peer(x, e, g)):
        x, gates = x_TE.clone().requires_grad_(), gates_TK.clone().requires_grad_()
        out = layer(x, gates, expert_TK)
        out.square().sum().backward()
        sides.append([out, x.grad, gates.grad])
    for module, side in zip((ours.experts, theirs), sides, strict=True):
        side += [local(p.grad) for _, p in sorted(module.named_parameters())]
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True) if b.numel()]
    return max(gaps)


def refusal(model: nn.Module, parallel: ParallelConfig, strategy: Any, meshes: Meshes) -> str:
    mesh, layout = meshes.of(parallel)
    try:
        parallelize(model, mesh, strategy, layout=layout)
    except UserError as error:
        return str(error)
    return "nothing"


def of_three(model: TokenModel) -> TokenModel:
    model.blocks[1].experts.weight = nn.Parameter(torch.zeros(3, 16, 16))
    model.blocks[1].experts.bias = nn.Parameter(torch.zeros(3, 16))
    return model


def planned(model: TokenModel, *patterns: str) -> TokenModel:
    plan = plan_of(model)
    assert plan is not None
    declare_plan(model, replace(plan, experts={pattern: {} for pattern in patterns}))
    return model


def computed() -> dict[str, Any]:
    meshes = Meshes()
    results: dict[str, Any] = {name: step_of(*case, meshes) for name, case in CASES.items()}
    results["transformers"] = beside_transformers(meshes)
    ep = ParallelConfig(ep=2)
    results["refused"] = [
        refusal(of_three(TokenModel()), ep, "fsdp", meshes),
        refusal(planned(TokenModel()), ep, "fsdp", meshes),
        refusal(planned(TokenModel(), "blocks.*.norm"), ep, "fsdp", meshes),
        refusal(TokenModel(), ep, "ddp", meshes),
    ]
    return results


def test_experts_of_any_model_over_four_processes() -> None:
    results = run_ranks(computed, 4)
    for name in CASES:
        assert results[0][name]["gradient"] <= 1e-5 and not results[0][name]["missing"], results[0][name]
        # a layer's exchanges, of counts, there and back, are one break of a graph; a recomputation has graphs of its own
        graphs = {"compiled": (1, 2), "compiled, recomputed": (2, 4)}.get(name, (0, 0))
        assert (results[0][name]["breaks"], results[0][name]["graphs"]) == graphs
    for rank in results:
        assert rank["transformers"] <= 1e-5
        assert rank["ep 2 x edp 2"]["held"]["blocks.0.experts.weight"] == (2, 8, 16)
        assert rank["ep of four, recomputed"]["held"]["blocks.0.experts.bias"] == (1, 16)
        calls = rank["ep of four, recomputed"][
            "calls"
        ]  # of two layers, forward and backward; a recomputation sends nothing
        assert calls == {"counts": 2, "dispatch": 4, "combine": 4}, calls
        assert rank["ep of four, recomputed"]["reads"] == 2  # by the host: the counts of each layer
    words = (
        "does not divide the 3 experts",
        "has no experts",
        "stacked by expert alone",
        "goes with parallel.strategy fsdp",
    )
    for message, expected in zip(results[0]["refused"], words, strict=True):
        assert expected in message, message
