"""Measured batches on two processes: all agree on what is tried, and the figures are those of the slowest and the fullest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.spawn import run_ranks


def _measure(folder: str, rank_folder: str, strategy: str) -> list[Any]:
    import os

    from mmspeed.pipelines.tuning.profile import profile
    from tests.support.runs import small_config

    config = small_config(Path(folder) / os.environ["RANK"], f"parallel.strategy={strategy}", f"output={rank_folder}")
    measurement = profile(config, most=2, repeats=1)
    setting = measurement.measured.setting
    rows = [(str(row.bucket), row.batch, row.seconds, row.peak_bytes) for row in measurement.measured.rows]
    return [
        rows,
        measurement.measured.limit_bytes,
        setting["devices"],
        setting["parallel.strategy"],
        measurement.state_bytes,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_processes_agree(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(_measure, 2, str(tmp_path), str(tmp_path / "runs"), strategy)
    assert first[:4] == second[:4]  # what each holds of the weights may differ by a row
    assert [row[:2] for row in first[0]] == [("5x32x48", 1), ("5x32x48", 2)]
    assert first[2:4] == [2, strategy]
    assert (tmp_path / "runs" / "small" / "buckets.json").exists()
