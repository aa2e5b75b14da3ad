"""`mmspeed demo --task language --parallel`: the same steps on one process and on two with half of the experts each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.__main__ import main


def test_two_processes_with_half_of_the_experts_train_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--task", "language", "--short", "--parallel", "ep=2", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr()
    rows = re.findall(r"step (\d+)(?:, held-out)? +([\d.]+) +([\d.]+) ", said.err)
    assert len(rows) == 7 and all(float(one) == pytest.approx(float(two), rel=1e-4) for _, one, two in rows), rows
    assert re.search(r"combine ep \d+\.\d kB, counts ep 96 B, dispatch ep", said.err)
    assert "the greatest load of a process" in said.err
    assert (tmp_path / "runs" / "short-one-dp-shard-2-ep-2" / "metrics.jsonl").is_file()
    assert main(["demo", "--parallel", "ep=2", "--output", str(tmp_path)]) == 1
    assert "--parallel goes with --task language" in capsys.readouterr().err
