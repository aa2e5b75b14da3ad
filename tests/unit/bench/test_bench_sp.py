"""The bench of sequence parallelism: bytes are those of the formulas, parts add up, and exit codes tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from mmspeed.__main__ import main
from mmspeed.bench.latents import parse_latent
from mmspeed.errors import UserError
from tests.claims.sp import DEPTH, Ratio, SchemeRow, SpResult, StepShares, bench_sp, parts_of, schemes

PARTS = StepShares(0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.02)
ROW = SchemeRow("full, ring", 1.0, Ratio(1.2, 1.1, 1.4), Ratio(1.1, 1.0, 1.2), PARTS, 100, 100, True, 0.51)
RESULT = SpResult(2, 1, 64, 48, 3, Ratio(1.01, 0.9, 1.1), Ratio(1.0, 1.0, 1.0), [ROW])


@pytest.mark.slow
def test_two_processes_send_what_the_formulas_say() -> None:
    words = ["bench", "sp", "--latent", "3x8x12", "--width", "48", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mmspeed", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    contents = json.loads(done.stdout)
    assert contents["ranks"] == 2 and contents["passed"] and contents["tokens"] == 3 * 4 * 6
    rows = {row["name"]: row for row in contents["rows"]}
    assert list(rows) == [scheme.name for scheme in schemes(2)]
    for row in rows.values():
        assert row["equal"] and row["ledger_bytes"] == row["formula_bytes"] > 0
        assert row["seconds"] > 0 and 0.4 < row["kept"] < 0.9
        shares = [row["parts"][name] for name in ("compute", "copies", "transfer", "waiting", "gradients", "optimizer")]
        assert sum(shares) == pytest.approx(1, abs=1e-6) and min(shares) > -0.05
    tokens = 3 * 24 // 2 * 48 * 4  # bytes of a rank's tokens; the prediction of 64 values a token comes on top
    assert rows["full, ulysses"]["ledger_bytes"] == DEPTH * 8 * tokens // 2 + 2 * (tokens * 64 // 48)


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


def test_what_fails() -> None:
    assert RESULT.passed(True) and "FAILED" not in "\n".join(RESULT.lines()) and "PASS" in RESULT.lines()[1]
    slow = replace(RESULT, degree_one=Ratio(1.04, 1.0, 1.1))
    assert slow.passed(False) and not slow.passed(True) and "FAIL" in slow.lines()[1]
    assert not json.loads(slow.to_json(strict=True))["passed"]
    wrong = replace(RESULT, rows=[replace(ROW, equal=False, formula_bytes=1234)])
    assert not wrong.passed(False) and "FAILED: the formula says 1,234" in wrong.lines()[-1]


@pytest.mark.parametrize("text", ["8x32", "8x31x32", "0x2x2", "axbxc", "8x32x32x4"])
def test_latents_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match="--latent"):
        parse_latent(text)
    assert parse_latent("9x6x10") == (9, 6, 10)


def test_widths_and_worlds_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--width 50"):
        bench_sp((1, 2, 2), 50, 1)
    with pytest.raises(UserError, match="--ranks 2"):
        bench_sp((1, 2, 2), 48, 1)
    assert main(["bench", "sp", "--ranks", "1"]) == 2
    assert "--ranks" in capsys.readouterr().err
