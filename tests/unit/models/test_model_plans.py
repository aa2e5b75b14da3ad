"""Plans that do not fit their models are refused by name; what plans of diffusers' classes hold, and what they leave out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.comm import Axis
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory.chunks import set_chunks
from mmspeed.memory.recompute.regions import region_modules, regions_of, set_policies
from mmspeed.models.diffusers.plans import declare_known_plan, plan_for
from mmspeed.parallel import TokenLayout, parallelize, sequence_parallel
from mmspeed.parallel.boundaries.boundary import ModuleBoundary
from mmspeed.parallel.boundaries.record import ForwardRecord, Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import (
    Linear,
    ModelPlan,
    Region,
    Seen,
    Split,
    declare_plan,
    plan_of,
)
from tests.support.added_model import Meshes
from tests.support.video_transformers import make_model
from tests.unit.test_mesh import fake_world

# no process group is behind these: nothing is computed
AXES = SequenceAxes(Axis.alone("ring"), Axis("ulysses", None, 2, 0))


def wan(**changes: Any) -> tuple[nn.Module, ModelPlan]:
    model = make_model("wan", **changes)
    return model, plan_for(model)


def test_what_is_not_there_is_reported_with_the_nearest_name() -> None:
    """Other names of a plan are in test_plan_names.py."""
    model, plan = wan()
    any_keyword = {"blocks.*.ffn": {"x": Seen("video", 1)}}
    sequence_parallel(model, SequenceAxes.alone(), replace(plan, inputs=any_keyword))
    model, plan = wan()
    own = type(model)
    with pytest.raises(UserError, match=r"plan, after: .* did you mean 'norm_out'"):
        sequence_parallel(model, AXES, replace(plan, after=("norm_outt",)))
    assert type(model) is own and plan_of(model) is None  # it is as it was


def test_regions_and_chunks_of_the_classes() -> None:
    for case, regions, chunks in (
        ("wan", ("attention", "cross_attention", "mlp"), True),
        ("ltx", ("attention", "cross_attention", "mlp"), True),
        ("cogvideox", ("attention", "mlp"), False),
        ("hunyuan", ("attention",), False),
    ):
        model = make_model(case)
        declare_known_plan(model)
        for block in plan_for(model).blocks:
            module = model.get_submodule(block.name)
            assert regions_of(module) == regions
            assert set_chunks(module, None) == chunks
            with pytest.raises(UserError, match=r"has no region norm \(it has block, attention"):
                set_policies(module, {"norm": "recompute"})
            assert all(len(region_modules(module, region)) == 1 for region in regions)


def test_a_region_of_one_tensor_wants_layers_that_prepare_it() -> None:
    model, plan = wan()
    declare_plan(model, replace(plan, regions={"mlp": Region(("ffn",), small=True)}))
    with pytest.raises(UserError, match="'mlp' of WanTransformerBlock is small, so its modules must be linear layers"):
        set_policies(model.get_submodule("blocks.0"), {"mlp": "recompute"})


@pytest.mark.parametrize("case", ["wan", "flux, images", "chronoedit, by its own declaration"])
def test_a_known_plan_is_put_on_its_model_once(case: str) -> None:
    model = make_model(case)
    declare_known_plan(model)
    known = plan_of(model)
    assert (known is None) == ("declaration" in case)
    declare_known_plan(model)
    assert plan_of(model) is known


@pytest.mark.parametrize("case", ["wan"])
def test_fused_projections_have_no_roles(case: str) -> None:
    model = make_model(case)
    model.fuse_qkv_projections()  # type: ignore[operator]
    assert plan_for(model).linears == {}


@pytest.mark.parametrize(("tp", "hybrid"), [(1, 3), (3, 2), (2, 1)])
def test_positions_stand_in_the_order_of_the_tokens_seen(tp: int, hybrid: int) -> None:
    """What sparse attention takes for the positions of all tokens is what the processes hold, one after the other."""
    _, plan = wan()
    order, tokens = [], torch.arange(45)
    for place in range(hybrid):
        whole = Axis("sequence", None, hybrid, place)
        axes = SequenceAxes(whole, Axis.alone("ulysses"))
        sequences = Sequences(plan, TokenLayout(axes, whole, whole=whole, tensor=Axis("tp", None, tp, 0)))
        boundary = ModuleBoundary(sequences, "here", "columns", (), "columns")
        record = ForwardRecord(sequences)
        order.append(boundary.piece(record, tokens[None], Split("video", 1, level="seen"), "rotary")[0])
    assert torch.equal(torch.cat(order), record.in_order_of_all(tokens, "video", "columns", "here"))
    assert torch.equal(torch.cat(order).sort().values, tokens)


def joined() -> tuple[nn.Module, ModelPlan]:
    model = make_model("flux, images")
    plan = plan_for(model)
    rows = {"single_transformer_blocks.*.proj_out": Linear("row", ("text", "video"), dim=1, joined=(40, 80))}
    return model, replace(plan, linears={**plan.linears, **rows})


def fused() -> tuple[nn.Module, None]:
    model = make_model("flux, images")
    model.fuse_qkv_projections()  # type: ignore[operator]
    return model, None


def changed(**changes: Any) -> tuple[nn.Module, ModelPlan]:
    model, plan = wan()
    return model, replace(plan, **changes)


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, ModelPlan | None]], str]] = {
    "no plan": (
        lambda: (make_model("chronoedit, by its own declaration"), None), "ChronoEditTransformer3DModel has no plan",
    ),
    "fused": (fused, "the plan of FluxTransformer2DModel gives its layers no roles; use ring and ulysses"),
    "joined": (joined, "the 200 channels of single_transformer_blocks.0.proj_out join 40 and 80: their sum must be all"),
    "attributes": (
        lambda: changed(divided={"blocks.*.attn1": ("head_count",)}),
        "plan, divided: blocks.0.attn1 (WanAttention) has no whole number 'head_count'",
    ),
    "norms": (
        lambda: changed(channel_norms=("blocks.*.norm1",)),
        "plan, channel_norms: blocks.0.norm1 (FP32LayerNorm) is a norm over all heads in the plan, and no torch.nn.RMSNorm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_parallelism_is_refused_by_name(name: str) -> None:
    """Before anything travels; layers of other models are in tests/ranks/test_linear_roles.py."""
    make, words = REFUSED[name]
    model, plan = make()
    if plan is None:
        declare_known_plan(model)
    else:
        declare_plan(model, plan)
    with fake_world(0, 2), pytest.raises(UserError, match=re.escape(words)):
        mesh, layout = Meshes().of(ParallelConfig(tp=2))
        parallelize(model, mesh, "none", layout=layout)
