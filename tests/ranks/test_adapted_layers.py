"""Roles of layers that adapters hold: peft's LoRA on a small Wan, tensor-parallel beside one process; what cannot be split is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoHaConfig, LoraConfig, PeftConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.memory.chunks import set_chunks
from mmspeed.memory.recompute.regions import set_policies
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.parallel import parallelize, sum_shared_gradients, uncrossed
from mmspeed.parallel.boundaries.names import check_plan
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole, worst
from tests.support.spawn import run_ranks
from tests.support.video_transformers import loss_of, make_inputs, make_model
from tests.unit.test_mesh import fake_world

# blocks of one stream: their last layer takes heads and hidden units side by side
JOINED = r"single_transformer_blocks\.0\.(attn\.to_[qkv]|proj_mlp|proj_out)"
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]


@dataclass(frozen=True)
class Case:
    parallel: ParallelConfig
    strategy: Any = "none"
    keeping: BlockPolicies | None = None
    model: str = "wan"
    host: bool = False


CASES = {
    "tp of joined channels": Case(ParallelConfig(tp=2), model="flux, images"),
    "tp": Case(ParallelConfig(tp=2)),
    "tp, fsdp, recomputed, MLPs in parts": Case(
        ParallelConfig(tp=2), "fsdp", BlockPolicies.everywhere({"block": "recompute"}, mlp_chunk=7)
    ),
    "ulysses": Case(ParallelConfig(ulysses=2), "fsdp"),
    "base on the host, recomputed": Case(  # on a CPU this proves the wiring alone
        ParallelConfig(ulysses=2), "fsdp", BlockPolicies.everywhere({"block": "recompute"}), host=True
    ),
}


def lora(**changes: Any) -> LoraConfig:
    """A LoRA of attention and MLP, with numbers that are not 0 and a bias of the second product."""
    return LoraConfig(**{"r": 3, "target_modules": LAYERS, "init_lora_weights": False, "lora_bias": True, **changes})


def adapted(config: PeftConfig, name: str = "wan") -> nn.Module:
    """A small model, Wan or another, whose base is frozen, under an adapter."""
    model = make_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "to_k.lora_B" in name and name.endswith("bias"):  # whose gradient is nearly 0, and all of it rounding
            parameter.requires_grad_(False)
    declare_known_plan(model)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def step_of(case: Case, meshes: Meshes) -> dict[str, Any]:
    mesh, layout = meshes.of(case.parallel)
    layers = lora() if case.model == "wan" else lora(target_modules=JOINED)
    inputs, alone = make_inputs(case.model), adapted(layers, case.model)
    true = loss_of(alone, inputs)
    true.backward()
    names = list(alone.state_dict())
    before = layout.ledger.copy()
    model = parallelize(
        adapted(layers, case.model), mesh, case.strategy, layout=layout, keeping=case.keeping, host=case.host
    )
    loss = loss_of(model, inputs)
    (loss / dist.get_world_size()).backward()  # all give the same loss
    sum_shared_gradients(model.parameters(), layout.tensor)
    loss, true = loss.detach(), true.detach()
    error, name = worst(
        {n: whole(p.grad) for n, p in trained(model).items() if p.grad is not None},
        {n: p.grad for n, p in trained(alone).items() if p.grad is not None},
    )
    state = get_model_state_dict(model)
    same = [n for n, value in alone.state_dict().items() if torch.equal(whole(state[n]), value)]
    return {
        "loss": abs(float(loss) - float(true)) / float(true),
        "gradient": error,
        "name": name,
        "calls": {f"{kind} {axis}": n for (kind, axis), n in layout.ledger.since(before).calls.items()},
        "uncrossed": uncrossed(model),
        "names": list(state) == names,
        "changed": sorted(set(names) - set(same)),
        "frozen": trained(model).keys() == trained(alone).keys(),
        "split": sorted(
            name.partition("attn1.")[2]
            for name, p in model.named_parameters()
            if name.startswith("blocks.0.attn1.to_")
            and isinstance(p, DTensor)
            and "tp" in (p.device_mesh.mesh_dim_names or ())
        ),
    }


def held(config: PeftConfig) -> Callable[[], nn.Module]:
    return lambda: adapted(config)


def dropped() -> nn.Module:
    return adapted(lora(lora_dropout=0.1))


def merged() -> nn.Module:
    model = adapted(lora())
    model.get_submodule("blocks.1.ffn.net.2").merge()  # type: ignore[operator]
    return model


def tied() -> nn.Module:
    model = adapted(lora())
    first, second = (model.get_submodule(f"blocks.{n}.attn1.to_q.lora_A.default") for n in (0, 1))
    second.register_parameter("weight", first.weight)  # type: ignore[arg-type]
    return model


class PackedParameter(nn.Parameter):
    """A parameter of a class of its own, as quantised weights are."""


def quantised(adapter: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = adapted(lora()) if adapter else make_model("wan")
        declare_known_plan(model)
        layer = model.get_submodule("blocks.0.attn1.to_q" + (".base_layer" if adapter else ""))
        layer.register_parameter("weight", PackedParameter(layer.weight.detach(), requires_grad=False))  # type: ignore[union-attr,operator]
        return model

    return make


def integers() -> nn.Module:
    model = make_model("wan")
    declare_known_plan(model)
    layer = model.get_submodule("blocks.0.attn1.to_q")
    layer.register_parameter("weight", nn.Parameter(torch.zeros(48, 24, dtype=torch.uint8), requires_grad=False))
    return model


PARAMETER = LoraConfig(r=2, target_modules=[], target_parameters=["to_q.weight"])
QUERIES = "parallel.tp: blocks.0.attn1.to_q (Linear) has the role column, and "
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (dropped, QUERIES + "each process would draw another dropout of its adapter: set lora_dropout to 0"),
    "norms of the weight": (held(lora(use_dora=True, lora_bias=False)), "computes with more than two products (DoraLinearVariant"),
    "another kind": (held(LoHaConfig(r=2, target_modules=LAYERS)), "and its adapter is no LoRA of a linear layer: merge it"),
    "a parameter": (held(PARAMETER), "(ParamWrapper) has the role column, and its adapter is no LoRA of a linear layer"),
    "merged": (merged, "blocks.1.ffn.net.2 (Linear) has the role row, and its weight holds merged adapters (default): unmerge"),
    "tied": (tied, "blocks.0.attn1.to_q (Linear) has a role in the plan and shares its weight with blocks.1.attn1.to_q.lora_A"),
    "quantised": (quantised(False), QUERIES + "its weight is quantised (a PackedParameter of torch.float32)"),
    "quantised under an adapter": (quantised(True), QUERIES + "its weight is quantised (a PackedParameter of torch.float32)"),
    "whole numbers": (integers, QUERIES + "its weight is quantised (a Parameter of torch.uint8), and checkpoints and sharding"),
}  # fmt: skip


def refusal(model: nn.Module, meshes: Meshes) -> str:
    mesh, layout = meshes.of(ParallelConfig(tp=2))
    try:
        parallelize(model, mesh, "none", layout=layout)
    except UserError as error:
        return str(error)
    return "nothing"


def computed() -> dict[str, Any]:
    meshes = Meshes()
    return {name: step_of(case, meshes) for name, case in CASES.items()}


@cache
def on_two() -> dict[str, Any]:
    return run_ranks(computed, 2)[0]


def hold(step: dict[str, Any], case: Case) -> None:
    assert step["loss"] <= 1e-5 and step["gradient"] <= 1e-5, step
    assert step["names"] and step["changed"] == [] and step["frozen"] and step["uncrossed"] == [] and step["calls"], (
        step
    )
    columns = [f"to_{x}.{part}" for x in "kqv" for part in ("base_layer.bias", "base_layer.weight")]
    columns += [f"to_{x}.lora_B.default.{part}" for x in "kqv" for part in ("bias", "weight")]
    rows = ["to_out.0.base_layer.weight", "to_out.0.lora_A.default.weight"]
    if case.model == "wan" and case.parallel.tp > 1:
        assert set(step["split"]) == {*columns, *rows}


@pytest.mark.slow
def test_two_processes_and_one_agree() -> None:
    for name, case in CASES.items():
        hold(on_two()[name], case)


@pytest.mark.slow
def test_adapters_add_no_exchange() -> None:
    """The exchanges of two blocks (two attentions and an MLP each): gathered tokens, squares of norms over all heads, scattered sums.

    Then the output is gathered. Backward turns each around, but for the first gather, of tokens that no trained layer made.
    """
    gathers, sums = 2 * (3 + 4) + 1, 2 * 3
    calls = on_two()["tp"]["calls"]
    assert calls["all_gather tp"] == gathers + sums and calls["reduce_scatter tp"] == sums + gathers - 1, calls
    assert calls["all_reduce tp"] == 1, calls  # of what all processes hold


def test_what_cannot_be_split_is_refused_by_name() -> None:
    """Before anything travels, so that there need be no other process."""
    with fake_world(0, 2):
        meshes = Meshes()
        for make, words in REFUSED.values():
            assert words in refusal(make(), meshes)


@pytest.mark.parametrize("layer", ["up", "down"])
def test_an_adapter_around_a_layer_that_prepares_its_input_is_named(layer: str) -> None:
    """In any layout: what it is given is not what the product takes."""
    model = SoraDiT(SoraDiTConfig(24, 1, 2, 3, 10))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=[f"mlp.{layer}"]), model)
    block = model.get_submodule("blocks.0")
    words = rf"mlp\.{layer}.*an adapter holds a (Norm|Act)Linear, which prepares its input"
    with pytest.raises(UserError, match=words):
        check_plan(model, model.plan)
    with pytest.raises(UserError, match=words):
        set_chunks(block, 4)
    with pytest.raises(UserError, match="which prepares its input"):
        set_policies(block, {"norm" if layer == "up" else "activation": "recompute"})
