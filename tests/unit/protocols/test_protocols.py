"""Protocols of models: the members that they require of a module, and the error for a missing one."""

from __future__ import annotations

import pytest
from torch import nn

from mmspeed.errors import UserError
from mmspeed.memory.chunks import set_chunks
from mmspeed.mixin import mix_in
from mmspeed.protocols import trainable
from mmspeed.protocols.plan import ModelPlan, declare_plan, modules_like, named_like, plan_of
from tests.support.mlps import PlainMlp, chunk_sizes
from tests.support.toy import ToyDiT


class Mixin(nn.Module):
    share: float


def test_blocks_are_seen_though_they_are_a_submodule() -> None:
    model = ToyDiT()
    assert trainable(model) is model and trainable(model).blocks is model.blocks


@pytest.mark.parametrize(("task", "by"), [(None, ""), ("video", " by the task video")])
def test_what_a_model_lacks_is_named(task: str | None, by: str) -> None:
    with pytest.raises(UserError, match=rf"^Linear cannot be trained{by}: it lacks blocks \(see mmspeed\.protocols\."):
        trainable(nn.Linear(2, 2), task)


def test_chunks_are_set_where_they_are_declared() -> None:
    block = PlainMlp(2, 4, 2)
    assert set_chunks(block, 3) and not set_chunks(nn.Linear(2, 2), 3)
    assert chunk_sizes(block) == [3]
    assert set_chunks(block, 5) and chunk_sizes(block) == [5]
    assert chunk_sizes(nn.Sequential(nn.Linear(2, 2), block)) == [5]  # nothing is put on what is not declared


@pytest.mark.parametrize(
    "pattern", ["", "*", "blocks.*", "blocks.1", "blocks.*.*", "b*.?.attn", "blocks.[01].mlp.*", "final", "*.*.*.*"]
)
def test_modules_like_a_pattern_are_those_whose_names_match(pattern: str) -> None:
    model = ToyDiT()
    names = [name for name, _ in model.named_modules() if named_like(name, pattern)]
    if names:
        assert modules_like(model, pattern, "plan") == [(name, model.get_submodule(name)) for name in names]
    else:
        with pytest.raises(UserError, match=r"^plan: ToyDiT has no module"):
            modules_like(model, pattern, "plan")


def test_a_module_of_two_names_matches_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.ModuleList([shared]), "b": nn.ModuleList([shared])})
    assert modules_like(model, "*.0", "plan") == [("a.0", shared)]


def test_a_plan_is_taken_from_the_model_that_declares_one() -> None:
    model = nn.Linear(2, 2)
    assert plan_of(model) is None
    plan = ModelPlan(blocks=())
    declare_plan(model, plan)
    assert plan_of(model) is plan
    model.plan = "something else of this name"  # type: ignore[assignment]
    assert plan_of(model) is None


def test_a_mixed_module_is_the_same_module() -> None:
    layer = nn.Linear(2, 2)
    mixed = mix_in(layer, Mixin)
    assert mixed is layer and mix_in(layer, Mixin) is layer and type(layer).__name__ == "MixinLinear"
