"""Protocols of models: what they see of a module, and what is said of one that lacks a part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmspeed.errors import UserError
from mmspeed.memory.chunks import exact_chunks, set_chunks
from mmspeed.mixin import mix_in
from mmspeed.protocols import Block, Chunked, ModelPlan, declare_plan, plan_of, trainable
from tests.toy import ToyDiT


class Mixin(nn.Module):
    share: float


def test_blocks_are_seen_though_they_are_a_submodule() -> None:
    model = ToyDiT()
    assert trainable(model) is model and trainable(model).blocks is model.blocks


@pytest.mark.parametrize(("task", "by"), [(None, ""), ("video", " by the task video")])
def test_what_a_model_lacks_is_named(task: str | None, by: str) -> None:
    with pytest.raises(UserError, match=rf"^Linear cannot be trained{by}: it lacks blocks \(see mmspeed\.protocols\."):
        trainable(nn.Linear(2, 2), task)


@pytest.mark.parametrize("exact", [True, False])
def test_chunks_are_set_where_they_are_declared(exact: bool) -> None:
    model = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Sequential(nn.Linear(2, 8), nn.GELU()), nn.Linear(8, 2)), "other": nn.Linear(2, 2)}
    )
    block, x = model["mlp"], torch.linspace(-1, 1, 14).view(7, 2)
    block(x).square().sum().backward()
    plain = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    declare_plan(model, ModelPlan((Block("mlp"),), chunks=(Chunked("0.0", "1", "0", "gelu"),)))
    assert set_chunks(block, 3, exact) and not set_chunks(model["other"], 3)
    assert [chunk.size for chunk in exact_chunks(block)] == ([3] if exact else [])
    block(x).square().sum().backward()
    for parameter, grad in zip(block.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0.0 if exact else 1e-6, atol=0.0 if exact else 1e-6)


def test_a_plan_is_taken_from_the_model_that_declares_one() -> None:
    model = nn.Linear(2, 2)
    assert plan_of(model) is None
    plan = ModelPlan(blocks=())
    model.plan = plan  # type: ignore[assignment]
    assert plan_of(model) is plan
    model.plan = "something else of this name"  # type: ignore[assignment]
    assert plan_of(model) is None


def test_a_mixed_module_is_the_same_module() -> None:
    layer = nn.Linear(2, 2)
    mixed = mix_in(layer, Mixin)
    assert mixed is layer and mix_in(layer, Mixin) is layer and type(layer).__name__ == "MixinLinear"
