"""Names of a plan that a model has not are refused with the nearest ones; those of published classes are in test_model_plans.py.

Boundaries that no forward crosses are named too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from mmspeed.comm import Axis
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.parallel import TokenLayout, parallelize, uncrossed
from mmspeed.parallel.boundaries.apply import Boundaries
from mmspeed.parallel.boundaries.record import Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import (
    Block,
    Chunked,
    Gather,
    Linear,
    ModelPlan,
    Region,
    Seen,
    Site,
    Split,
    Tokens,
    declare_plan,
    named_like,
    plan_of,
)
from tests.support.added_model import loss_of, make_model

# no process group is behind these: nothing is computed
ULYSSES = Axis("ulysses", None, 2, 0)
IMAGE = (1, 4, 6, 6)  # frames, height, width, caption tokens: nothing is exchanged for it
LAYOUT = TokenLayout(SequenceAxes(Axis.alone("ring"), ULYSSES), hybrid=ULYSSES, whole=ULYSSES)


class GivesMapping(nn.Module):
    """A block whose forward gives a dict."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> dict[str, Any]:
        out = self.block(*args)
        return {"sample": out, "shape": out.shape}


def planned() -> tuple[nn.Module, ModelPlan]:
    model = make_model()
    plan = plan_of(model)
    assert plan is not None
    return model, plan


def refused(changes: dict[str, Any], words: str) -> None:
    model, plan = planned()
    declare_plan(model, replace(plan, **changes))
    own = type(model)
    with pytest.raises(UserError, match=words):
        parallelize(model, None, "none", layout=LAYOUT)
    assert type(model) is own  # it is as it was


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": {"patch": {"input": Split("video", 1)}}}, "plan, inputs: DiT has no module 'patch'; did you mean 'patch_in'"),
        ({"inputs": {"patch_in": {"inputs": Split("video", 1)}}}, r"patch_in \(Linear\) has no argument 'inputs'; did you mean 'input'"),
        ({"inputs": {"blocks.*.attention": {"x_BN": Seen("video", 1)}}}, "has no argument 'x_BN'; did you mean 'x_BNE'"),
        ({"outputs": {"finale": {0: Gather("video", 1)}}}, "plan, outputs: DiT has no module 'finale'; did you mean 'final'"),
        ({"image": ("x_BCThx", 2)}, "DiT has no argument 'x_BCThx'; did you mean 'x_BCThw'"),
        ({"regions": {"mlp": Region(("mlps",))}}, "region 'mlp': DiTBlock has no module 'mlps'; did you mean 'mlp'"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.9", "mlp.0", "gelu"),)}, "plan, chunks: DiTBlock has no module 'mlp.9'; did you mean 'mlp"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.1", activation="gelu"),)}, "plan, chunks: 'mlp.0.0': name `expands`"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.1"),)}, "where 'mlp.1' prepares its input itself"),
        ({"blocks": (Block("blocks.0", tokens={"x": Tokens("video", 1)}),)}, r"blocks.0 \(DiTBlock\) has no argument 'x'"),
        ({"channel_norms": ("blocks.*.mlp.0.1",)}, r"plan, channel_norms: blocks.0.mlp.0.1 \(GELU\) is a norm over all heads in the plan"),
        ({"divided": {"blocks.*.attention": ("head_width", "heds")}}, r"plan, divided: blocks.0.attention .* has no whole number 'heds'"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_reported_where_the_model_is_spread(changes: dict[str, Any], words: str) -> None:
    refused(changes, words)


SPLITS = {
    "patch_in": {"input": Split("video", 1)},
    "blocks.*": {"mask_B11L": Split(("video", "text"), 3)},  # it cuts both, and tells neither length
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": SPLITS}, "plan, inputs, 'blocks.*', 'mask_B11L': no split of the plan gives the length of sequence 'text'"),
        ({"inputs": {"final": {"x_BNE": Seen("vide", 1)}}}, "'final', 'x_BNE': no split .* sequence 'vide'; did you mean 'video'"),
        ({"outputs": {"final": {0: Gather("videos", 1)}}}, "plan, outputs, 'final', 0: .* 'videos'; did you mean 'video'"),
        ({"blocks": (Block("blocks.0", tokens={"x_BNE": Tokens("vid", 1)}),)}, "plan, blocks, 'blocks.0', 'x_BNE': .* 'vid'; did you mean"),
        ({"attention": {"blocks.*.attention.attend": Site(("video",), ("caption",))}}, "plan, attention, .* sequence 'caption'$"),
        ({"linears": {"blocks.*.mlp.1": Linear("row", "vdeo", dim=1)}}, "plan, linears, .*mlp.1': .* 'vdeo'; did you mean 'video'"),
        ({"long_text": "texts"}, "plan, long_text: no split .* sequence 'texts'; did you mean 'text'"),
    ],
)  # fmt: skip
def test_a_sequence_that_no_split_tells_the_length_of_is_reported_where_the_model_is_spread(
    changes: dict[str, Any], words: str
) -> None:
    if "inputs" in changes and changes["inputs"] is not SPLITS:
        changes = {"inputs": {**planned()[1].inputs, **changes["inputs"]}}
    refused(changes, words)


@pytest.mark.parametrize("gone", ["pos_T1X", "pos_1SX"])
def test_sparse_attention_whose_positions_no_split_tells_is_reported_where_the_model_is_spread(gone: str) -> None:
    model = SoraDiT(SoraDiTConfig(48, 2, 4, 3, 10, adaln_rank=4, sparse=SparseConfig(dense_first=0, dense_last=0)))
    inputs = {name: {k: v for k, v in what.items() if k != gone} for name, what in model.plan.inputs.items()}
    declare_plan(model, replace(model.plan, inputs=inputs))
    across = replace(LAYOUT, shard="rows" if gone == "pos_T1X" else "columns")
    words = f"sparse, and no split of an input gives the positions of 'video' along {across.shard}; .*positions='{across.shard}'"
    with pytest.raises(UserError, match=words):
        parallelize(model, None, "none", layout=across)
    assert type(model) is SoraDiT
    other = replace(LAYOUT, shard="columns" if gone == "pos_T1X" else "rows")  # whose attention stays on a process
    parallelize(model, None, "none", layout=other)


def test_one_process_asks_for_no_sequences() -> None:
    model, plan = planned()
    declare_plan(model, replace(plan, long_text="texts"))
    assert loss_of(parallelize(model, None, "none"), IMAGE).isfinite()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (
            {"patch_in": {1: Gather("video", 1)}},
            r"patch_in \(Linear\), output 1: its forward returns 0; correct the plan",
        ),
        (
            {"blocks.0": {"sampel": Gather("video", 1)}},
            "output 'sampel': its forward returns 'sample', 'shape'.*did you mean 'sample'",
        ),
        ({"blocks.0": {"shape": Gather("video", 1)}}, "output 'shape' is a Size; the plan can gather and sum tensors"),
    ],
)
def test_an_output_that_is_not_there_is_reported_by_the_first_forward(outputs: dict[str, Any], words: str) -> None:
    model: Any = make_model()
    if "blocks.0" in outputs:
        model.blocks[0] = GivesMapping(model.blocks[0])
    plan = plan_of(model)
    assert plan is not None
    keep = {"blocks": (Block("blocks.0"),), "regions": {}, "chunks": (), "attention": {}, "linears": {}}
    inputs = {name: what for name, what in plan.inputs.items() if name in ("patch_in", "text_in")}
    declare_plan(model, replace(plan, **keep, inputs=inputs, outputs=outputs))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        loss_of(parallelize(model, None, "none", layout=LAYOUT), IMAGE)


def test_modules_after_the_blocks_hold_the_tokens_as_the_last_block_does() -> None:
    model: Any = SoraDiT(SoraDiTConfig(48, 2, 4, 3, 10, adaln_rank=4))
    model.final = nn.Sequential(model.final)
    gathers = {name: {0: Gather("video", dim=2, rows=1)} for name in ("", "patch_in", "final.0")}
    plan = replace(model.plan, inputs={"patch_in": model.plan.inputs["patch_in"]}, outputs=gathers, long_text=None)
    plan = replace(plan, attention={name: site for name, site in plan.attention.items() if site.keys is None})
    actual = Boundaries(model, Sequences(plan, LAYOUT)).boundaries
    assert [block.attends for block in plan.blocks] == ["columns", "rows"]
    assert (actual[""].attends, actual[""].gives) == ("columns", "rows")
    assert (actual["patch_in"].attends, actual["final.0"].attends) == ("columns", "rows")


def test_a_star_stands_for_no_empty_name() -> None:
    assert named_like("final", "*") and named_like("", "") and not named_like("", "*") and not named_like("final", "")


def test_a_block_that_is_not_there_is_reported_where_the_plan_is_declared() -> None:
    model, plan = planned()
    with pytest.raises(UserError, match=r"DiT has no block 'block.0'; did you mean 'blocks.0'"):
        declare_plan(model, replace(plan, blocks=(Block("block.0"),)))


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("inputs", {"spare": {"input": Split("video", 1)}}, "spare (Linear)"),
        ("outputs", {"spare": {0: Gather("video", 1)}}, "spare (Linear)"),
        ("attention", {"spare_attention": Site(("video",))}, "spare_attention (Identity)"),
    ],
)
def test_a_boundary_that_is_never_crossed_is_named(kind: str, settings: dict[str, Any], named: str) -> None:
    model = make_model()
    model.add_module("spare", nn.Linear(4, 4))
    model.add_module("spare_attention", nn.Identity())
    plan = plan_of(model)
    assert plan is not None
    declare_plan(model, replace(plan, **{kind: {**getattr(plan, kind), **settings}}))
    spread = parallelize(model, None, "none", layout=LAYOUT)
    assert named in uncrossed(spread) and len(uncrossed(spread)) > 5  # before any forward
    loss_of(spread, IMAGE)
    assert uncrossed(spread) == [named]
