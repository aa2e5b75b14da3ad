"""Plans that do not fit their models are refused by name; what plans of diffusers' classes hold, and what they leave out."""

from __future__ import annotations

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
from mmspeed.parallel import TokenLayout, check_layout, parallelize, sequence_parallel
from mmspeed.parallel.boundaries.boundary import ModuleBoundary
from mmspeed.parallel.boundaries.record import ForwardRecord, Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import (
    Block,
    Chunked,
    Linear,
    ModelPlan,
    Region,
    Seen,
    Split,
    declare_plan,
    plan_of,
)
from tests.support.spawn import run_ranks
from tests.support.video_transformers import loss_of, make_inputs, make_model

# no process group is behind these: nothing is computed
AXES = SequenceAxes(Axis.alone("ring"), Axis("ulysses", None, 2, 0))


def wan(**changes: Any) -> tuple[nn.Module, ModelPlan]:
    model = make_model("wan", **changes)
    return model, plan_for(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": (Block("blcks.0"),)}, r"plan, blocks: WanTransformer3DModel has no module 'blcks.0'; did you mean 'blocks.0'"),
        ({"inputs": {"blocks.0": {"hidden_state": Split("video", 1)}}}, "has no argument 'hidden_state'; did you mean 'hidden_states'"),
        ({"inputs": {"blocks.*.ffn": {"x": Seen("video", 1)}}}, None),  # it takes any keyword
        ({"outputs": {"rop": {0: Split("video", 1)}}}, "plan, outputs: .* has no module 'rop'; did you mean 'rope'"),
        ({"channel_norms": ("blocks.*.norm_q",)}, "plan, channel_norms: "),
        ({"after": ("norm_outt",)}, "plan, after: .* did you mean 'norm_out'"),
        ({"regions": {"mlp": Region(("fnn",))}}, "region 'mlp': WanTransformerBlock has no module 'fnn'; did you mean 'ffn'"),
        ({"chunks": (Chunked("ffn.up", "ffn.net.2"),)}, "plan, chunks: WanTransformerBlock has no module 'ffn.up'"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_reported_with_the_nearest_name(changes: dict[str, Any], words: str | None) -> None:
    model, plan = wan()
    if words is None:
        sequence_parallel(model, SequenceAxes.alone(), replace(plan, **changes))
        return
    own = type(model)
    with pytest.raises(UserError, match=words):
        sequence_parallel(model, AXES, replace(plan, **changes))
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


def test_heads_that_do_not_divide_are_reported() -> None:
    model, plan = wan()
    declare_plan(model, plan)
    with pytest.raises(UserError, match=r"parallel.tp 3 does not divide the model's 4 heads: use one of 1, 2, 4"):
        check_layout(model, ParallelConfig(tp=3))
    with pytest.raises(
        UserError, match=r"parallel.ulysses 3 is more than the 2 heads of a device \(of 4, with parallel.tp 2\)"
    ):
        check_layout(model, ParallelConfig(tp=2, ulysses=3))
    with pytest.raises(
        UserError, match=r"parallel.dsp 2: every block of WanTransformer3DModel attends over all tokens"
    ):
        check_layout(model, ParallelConfig(dsp=2))


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


def refusals() -> dict[str, str]:
    """What tensor parallelism is refused for, on two processes."""
    from mmspeed.axes import AxisSizes
    from mmspeed.device import Device
    from mmspeed.mesh import make_mesh
    from mmspeed.parallel import make_layout

    mesh = make_mesh(Device("cpu", 0), AxisSizes(tp=2))
    layout = make_layout(mesh, ParallelConfig(tp=2))
    messages = {}

    def catch(name: str, model: nn.Module, plan: ModelPlan | None = None) -> None:
        if plan is None:
            declare_known_plan(model)
        else:
            declare_plan(model, plan)
        with pytest.raises(UserError) as caught:
            loss_of(parallelize(model, mesh, "none", layout=layout), make_inputs("wan"))
        messages[name] = str(caught.value)

    catch("chronoedit", make_model("chronoedit, by its own declaration"))
    model = make_model("flux, images")
    model.fuse_qkv_projections()  # type: ignore[operator]
    catch("fused", model)
    model = make_model("flux, images")
    plan = plan_for(model)
    joined = {"single_transformer_blocks.*.proj_out": Linear("row", ("text", "video"), dim=1, joined=(40, 80))}
    catch("joined", model, replace(plan, linears={**plan.linears, **joined}))
    model, plan = wan()
    catch("no layer", model, replace(plan, linears={"blocks.*.norm1": Linear("column")}))
    model, plan = wan(num_attention_heads=3)
    catch("heads", model, plan)
    model, plan = wan(ffn_dim=33)
    catch("channels", model, plan)
    model, plan = wan()
    catch("attributes", model, replace(plan, divided={"blocks.*.attn1": ("head_count",)}))
    model, plan = wan()
    catch("norms", model, replace(plan, channel_norms=("blocks.*.norm1",)))
    model, plan = wan()
    model.blocks[0].attn1.to_q = Adapted(model.blocks[0].attn1.to_q)  # type: ignore[union-attr,index]
    catch("adapters", model, plan)
    return messages


class Adapted(nn.Module):
    """A linear layer under an adapter of a kind of its own."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return run_ranks(refusals, 2)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fused", "the plan of FluxTransformer2DModel gives its layers no roles; use ring and ulysses"),
        ("joined", "the 200 channels of single_transformer_blocks.0.proj_out join 40 and 80: their sum must be all"),
        ("chronoedit", "ChronoEditTransformer3DModel has no plan"),
        ("no layer", "blocks.0.norm1 (FP32LayerNorm) has the role column in the plan and is no linear layer"),
        ("heads", "parallel.tp 2 does not divide the model's 3 heads: use one of 1, 3"),
        ("channels", "parallel.tp 2 does not divide the 33 channels of blocks.0.ffn.net.0.proj"),
        ("attributes", "plan, divided: blocks.0.attn1 (WanAttention) has no whole number 'head_count'"),
        (
            "norms",
            "plan, channel_norms: blocks.0.norm1 (FP32LayerNorm) is a norm over all heads in the plan, and no torch.nn.RMSNorm",
        ),
        ("adapters", "has the role column, and its adapter is no LoRA of a linear layer: merge it"),
    ],
)
def test_tensor_parallelism_is_refused_by_name(refused: dict[str, str], name: str, words: str) -> None:
    assert words in refused[name]
