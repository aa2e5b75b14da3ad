"""Names of a plan that a model has not are told with the nearest ones; those of published classes are in test_model_plans.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmspeed.comm import Axis
from mmspeed.errors import UserError
from mmspeed.parallel import TokenLayout, parallelize
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import Block, Chunked, Gather, Region, Seen, Site, Split, Tokens, declare_plan, plan_of
from tests.support.added_model import make_model

# no process group is behind these: nothing is computed
ULYSSES = Axis("ulysses", None, 2, 0)
LAYOUT = TokenLayout(SequenceAxes(Axis.alone("ring"), ULYSSES), hybrid=ULYSSES, whole=ULYSSES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": {"patch": {"input": Split("video", 1)}}}, "plan, inputs: DiT has no module 'patch'; did you mean 'patch_in'"),
        ({"inputs": {"patch_in": {"inputs": Split("video", 1)}}}, r"patch_in \(Linear\) has no argument 'inputs'; did you mean 'input'"),
        ({"inputs": {"blocks.*.attention": {"x_BN": Seen("video", 1)}}}, "has no argument 'x_BN'; did you mean 'x_BNE'"),
        ({"outputs": {"finale": {0: Gather("video", 1)}}}, "plan, outputs: DiT has no module 'finale'; did you mean 'final'"),
        ({"attention": {"final.attend": Site(("video",))}}, "plan, attention: DiT has no module 'final.attend'"),
        ({"cuts": ("block.1",)}, "plan, cuts: DiT has no module 'block.1'; did you mean 'blocks.1'"),
        ({"before": ("patchin",)}, "plan, before: DiT has no module 'patchin'; did you mean 'patch_in'"),
        ({"after": ("finals",)}, "plan, after: DiT has no module 'finals'; did you mean 'final'"),
        ({"image": ("x_BCThx", 2)}, "DiT has no argument 'x_BCThx'; did you mean 'x_BCThw'"),
        ({"regions": {"mlp": Region(("mlps",))}}, "region 'mlp': DiTBlock has no module 'mlps'; did you mean 'mlp'"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.9", "mlp.0", "gelu"),)}, "plan, chunks: DiTBlock has no module 'mlp.9'; did you mean 'mlp"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.1", activation="gelu"),)}, "plan, chunks: 'mlp.0.0': name `expands`"),
        ({"chunks": (Chunked("mlp.0.0", "mlp.1"),)}, "where 'mlp.1' prepares its input itself"),
        ({"blocks": (Block("blocks.0", tokens={"x": Tokens("video", 1)}),)}, r"blocks.0 \(DiTBlock\) has no argument 'x'"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_told_where_the_model_is_spread(changes: dict[str, Any], words: str) -> None:
    model = make_model()
    plan = plan_of(model)
    assert plan is not None
    declare_plan(model, replace(plan, **changes))
    own = type(model)
    with pytest.raises(UserError, match=words):
        parallelize(model, None, "none", layout=LAYOUT)
    assert type(model) is own  # it is as it was


def test_a_block_that_is_not_there_is_told_where_the_plan_is_declared() -> None:
    model = make_model()
    plan = plan_of(model)
    assert plan is not None
    with pytest.raises(UserError, match=r"DiT has no block 'block.0'; did you mean 'blocks.0'"):
        declare_plan(model, replace(plan, blocks=(Block("block.0"),)))
