"""Layouts of projections: the default one is that in which a fused product lies, without a copy.

Legend: B batch, T rows, S columns, A heads, N tokens, D head width.
"""

from __future__ import annotations

import pytest
import torch

from mmspeed.comm.packing import layout as order_of
from mmspeed.parallel.sequence.layouts import default_layout, dims_of, memory_order, tokens_first

A, D = 3, 5


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("columns", [False, True])
def test_the_default_is_how_a_fused_product_lies(batch: int, columns: bool) -> None:
    chosen = default_layout(batch, columns)
    qkv = torch.randn(batch, 4, 6, A, 3, D)  # B T S A 3 D
    q = qkv[..., 0, :].permute((0, 2, 3, 1, 4) if columns else (0, 1, 3, 2, 4))  # B G A N D
    if chosen != "BNGAD":
        q = q.flatten(0, 1)
    assert q.dim() == len(dims_of(chosen)) and q.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert order_of(q) == memory_order(chosen)


def test_orders() -> None:
    assert [memory_order(name) for name in ("BAND", "BNAD", "NBAD")] == [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]  # type: ignore[arg-type]
    assert memory_order("BNGAD") == (0, 3, 1, 2, 4)
    assert {tokens_first(name) for name in ("BAND", "BNAD", "NBAD")} == {(2, 0, 1, 3)}  # type: ignore[arg-type]
    assert tokens_first("BNGAD") == (3, 0, 1, 2, 4)
