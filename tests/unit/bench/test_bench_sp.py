"""The bench of sequence parallelism: bytes are those of the formulas."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.claims.sp import DEPTH, bench_sp, schemes
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
