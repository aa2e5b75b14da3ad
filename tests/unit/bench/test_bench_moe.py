"""The claim about experts: sides compute the same, and a ratio is the median of the rounds'."""

from __future__ import annotations

from pathlib import Path

from tests.claims.moe import IMPLEMENTATIONS, MoeSetting, Row, layer_rows


def test_layers_are_compared_on_the_same_tokens(tmp_path: Path) -> None:
    setting = MoeSetting(rounds=1, seeds=2, experts=(4, 6), tokens=12, width=16, hidden=8, top_k=2)
    rows = list(layer_rows(tmp_path, setting))
    assert len(rows) == 2 * len(IMPLEMENTATIONS) and all(row.gap < 1e-5 and len(row.ours) == 2 for row in rows), rows


def test_a_ratio_above_its_goal_is_told() -> None:
    row = Row("layer", (0.1, 0.3, 0.2), (0.1, 0.1, 0.1), 0.0, 1.05)
    assert row.ratio == 2.0 and "200.0 ms, 100.0 ms, ratio 2.000 (worse)" in row.line()
