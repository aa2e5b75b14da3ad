"""Layouts of projections: what SoraDiT's plan declares is how its fused product lies, without a copy.

Legend: B batch, A heads, N tokens, D head width, G columns that attend apart.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mmspeed.comm.packing import layout as order_of
from mmspeed.models import SoraDiT
from mmspeed.parallel.sequence.layouts import dims_of, memory_order, tokens_first
from mmspeed.protocols.plan import Structure
from tests.unit.test_sora_dit import inputs, small


class Noted(nn.Module):
    """In place of a block's attention: it notes the order of its values, which nothing has changed since their product."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend, self.order = attend, tuple[int, ...]()

    def forward(self, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, structure: Structure) -> Tensor:
        assert v_BAND._is_view() and q_BAND.shape == v_BAND.shape
        self.order = order_of(v_BAND)
        out: Tensor = self.attend(q_BAND, k_BAND, v_BAND, structure)
        return out


def noted(model: SoraDiT, block: int) -> Noted:
    attention = model.blocks[block].self_attention
    attention.attend = Noted(attention.attend)  # type: ignore[union-attr, arg-type, assignment]
    return attention.attend  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("arrangement", ["full", "factorised"])
def test_projections_lie_as_the_plan_declares(arrangement: str) -> None:
    model = small(arrangement=arrangement)
    site = model.plan.attention["blocks.*.self_attention.attend"]
    x, t, text, mask = inputs()  # of two videos
    found = [noted(model, place) for place in range(len(model.blocks))]
    model(x, t, text, mask)
    for block, one in zip(model.plan.blocks, found, strict=True):
        declared = site.rows_layout if block.attends == "rows" else site.layout
        assert one.order == memory_order(declared), block.name


def test_orders() -> None:
    assert [memory_order(name) for name in ("BAND", "BNAD", "NBAD")] == [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]  # type: ignore[arg-type]
    assert memory_order("BNGAD") == (0, 3, 1, 2, 4) and dims_of("BNGAD") == "BGAND"
    assert {tokens_first(name) for name in ("BAND", "BNAD", "NBAD")} == {(2, 0, 1, 3)}  # type: ignore[arg-type]
    assert tokens_first("BNGAD") == (3, 0, 1, 2, 4)
