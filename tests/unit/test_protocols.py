"""Protocols of models: what they see of a module, and what is said of one that lacks a part."""

from __future__ import annotations

import pytest
from torch import nn

from mmspeed.errors import UserError
from mmspeed.memory.recompute.policy import set_chunks
from mmspeed.mixin import mix_in
from mmspeed.protocols import ComputesInChunks, ModelPlan, plan_of, trainable
from tests.toy import ToyDiT


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_chunk: int | None = None
        self.exact_chunks = True


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
    block = nn.Sequential(nn.Linear(2, 2), Chunked())
    assert set_chunks(block, 3, exact=False) and not set_chunks(nn.Linear(2, 2), 3)
    part = block[1]
    assert isinstance(part, ComputesInChunks) and (part.token_chunk, part.exact_chunks) == (3, False)
    assert not hasattr(block[0], "token_chunk")


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
