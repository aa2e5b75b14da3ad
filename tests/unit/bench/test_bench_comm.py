"""The bench of the exchanges: bytes are those of the formulas, and exit codes tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from mmspeed.__main__ import main
from mmspeed.bench.comm import BATCH, HIDDEN, CommResult, ExchangeRow, bench_comm
from mmspeed.errors import UserError

ROW = ExchangeRow("all-gather, SBH", "point_to_point", 100, 100, True, 0, 1, 1, 0.5, 200.0, 1.25)


def _result(*rows: ExchangeRow) -> CommResult:
    return CommResult(2, "cpu", 100, 3, list(rows))


@pytest.mark.slow
def test_two_processes_send_what_the_formulas_say() -> None:
    command = [sys.executable, "-m", "mmspeed", "bench", "comm", "--megabytes", "0.2", "--rounds", "1", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    contents = json.loads(done.stdout)
    assert contents["ranks"] == 2 and contents["passed"]
    rows = {(row["name"], row["way"]): row for row in contents["rows"]}
    part = contents["part_bytes"]
    assert part == BATCH * HIDDEN * 4 * 8  # 0.2 MB, in whole tokens
    assert len(rows) == 23 and all(row["passed"] and row["seconds"] > 0 for row in rows.values())
    sent = {name: row["ledger_bytes"] for (name, way), row in rows.items() if way == "point_to_point"}
    assert sent["all-to-all S to H, BSH to SBH"] == part // 2
    assert sent["all-to-all H to S, BSH to BSH"] == part // 2
    assert sent["all-to-all of three in one message"] == 3 * part // 2
    assert sent["all-gather, BSH"] == sent["reduce-scatter, BSH"] == sent["ring hop"] == part
    copies = {name: (row["packs"], row["unpacks"]) for (name, _), row in rows.items()}
    assert copies["all-to-all S to H, BSH to SBH"] == copies["all-to-all S to H, SBH to SBH"] == (1, 0)
    assert copies["all-gather, SBH"] == copies["reduce-scatter, SBH"] == (0, 0)
    for (_, way), row in rows.items():
        assert (row["to_collective"] is None) == (way == "collective" or row["name"] == "ring hop")


def test_bytes_or_copies_that_are_wrong_fail() -> None:
    assert _result(ROW).passed() and "FAILED" not in "\n".join(_result(ROW).lines())
    bytes_wrong, copies_wrong = replace(ROW, ledger_bytes=99, equal=False), replace(ROW, packs=1)
    for row, words in ((bytes_wrong, "FAILED: bytes"), (copies_wrong, "FAILED: over 1 copies")):
        result = _result(ROW, row)
        assert not result.passed() and words in result.lines()[-1] and not json.loads(result.to_json())["passed"]


def test_one_process_is_advised_to_be_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--ranks 2"):
        bench_comm(0.1, 1)
    assert main(["bench", "comm", "--ranks", "1"]) == 2
    assert "--ranks" in capsys.readouterr().err
