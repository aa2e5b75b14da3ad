"""Layouts of projections: what SoraDiT's plan declares is how its fused product lies, without a copy.

Legend: B batch, A heads, N tokens, D head width, G columns that attend apart.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mmspeed.comm.packing import layout as order_of
from mmspeed.models.sora.layers import CrossAttention, SelfAttention
from mmspeed.parallel.sequence.hybrid_attention import dims_of, memory_order, tokens_first
from mmspeed.protocols.plan import Structure
from tests.unit.models.test_sora_dit import inputs, small


class Noted(nn.Module):
    """In place of a block's attention: it notes the order of its values, which nothing has changed since their product."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend, self.order = attend, tuple[int, ...]()

    def forward(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
        assert v_BAMD._is_view() and q_BAND.dim() == v_BAMD.dim()
        self.order = order_of(v_BAMD)
        out: Tensor = self.attend(q_BAND, k_BAMD, v_BAMD, structure)
        return out


def noted(attention: SelfAttention | CrossAttention) -> Noted:
    attention.attend = Noted(attention.attend)
    return attention.attend


@pytest.mark.parametrize("name", ["self_attention", "cross_attention"])
@pytest.mark.parametrize("arrangement", ["full", "factorised"])
def test_projections_lie_as_the_plan_declares(arrangement: str, name: str) -> None:
    model = small(arrangement=arrangement)
    site = model.plan.attention[f"blocks.*.{name}.attend"]
    results = [noted(block.get_submodule(name)) for block in model.blocks]  # type: ignore[arg-type]
    model(*inputs())  # of two videos
    for block, one in zip(model.plan.blocks, results, strict=True):
        declared = site.rows_layout if block.attends == "rows" else site.layout
        assert one.order == memory_order(declared), block.name


def test_orders() -> None:
    assert [memory_order(name) for name in ("BAND", "BNAD", "NBAD")] == [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]  # type: ignore[arg-type]
    assert memory_order("BNGAD") == (0, 3, 1, 2, 4) and dims_of("BNGAD") == "BGAND"
    assert {tokens_first(name) for name in ("BAND", "BNAD", "NBAD")} == {(2, 0, 1, 3)}  # type: ignore[arg-type]
    assert tokens_first("BNGAD") == (3, 0, 1, 2, 4)
