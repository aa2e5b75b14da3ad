"""The bench of sequence parallelism: bytes are those of the formulas, and parts add up."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from mmspeed.errors import UserError
from tests.claims.sp import DEPTH, Ratio, bench_sp, parts_of, schemes
from tests.support.spawn import run_ranks


@pytest.mark.slow
def test_two_processes_send_what_the_formulas_say() -> None:
    result, _ = run_ranks(bench_sp, 2, (3, 8, 12), 48, 1)
    assert result.ranks == 2 and result.passed() and result.tokens == 3 * 4 * 6
    rows = {row.name: row for row in result.rows}
    assert list(rows) == [scheme.name for scheme in schemes(2)]
    for row in rows.values():
        assert row.equal and row.ledger_bytes == row.formula_bytes > 0
        assert row.seconds > 0 and 0.4 < row.kept < 0.9
        shares = list(asdict(row.parts).values())[:-1]  # but for the imbalance
        assert sum(shares) == pytest.approx(1, abs=1e-6) and min(shares) > -0.05
    tokens = 3 * 24 // 2 * 48 * 4  # bytes of a rank's tokens; the prediction of 64 values a token comes on top
    assert rows["full, ulysses"].ledger_bytes == DEPTH * 8 * tokens // 2 + 2 * (tokens * 64 // 48)


def test_parts_add_up() -> None:
    """Two exchanges, and the second rank comes late to the first of them."""
    ranks = [
        {"phases": {"model": 10.0, "gradients": 1.0, "optimizer": 1.0}, "calls": [(3.0, 0.5), (1.0, 0.5)]},
        {"phases": {"model": 10.0, "gradients": 1.0, "optimizer": 1.0}, "calls": [(1.0, 0.5), (1.0, 0.5)]},
    ]
    parts = parts_of(ranks)
    assert parts.transfer == pytest.approx(2 / 12) and parts.waiting == pytest.approx(1 / 12)
    assert parts.copies == pytest.approx(1 / 12) and parts.compute == pytest.approx(6 / 12)
    assert parts.gradients == parts.optimizer == pytest.approx(1 / 12)
    assert parts.imbalance == pytest.approx((10 - 2 - 1) / 6 - 1)


def test_ratios_are_made_round_by_round() -> None:
    assert Ratio.of([2.0, 40.0, 9.0], [1.0, 10.0, 3.0]) == Ratio(3.0, 2.0, 4.0)


def test_widths_and_worlds_that_cannot_be() -> None:
    with pytest.raises(UserError, match="--width 50"):
        bench_sp((1, 2, 2), 50, 1)
    with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
        bench_sp((1, 2, 2), 48, 1)
