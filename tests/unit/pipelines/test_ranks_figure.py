"""The report's part about ranks, from rows as runs write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mmspeed.config import Config, dump_config
from mmspeed.pipelines.report.run_page import ranks_figures, write_report
from tests.support.runs import small_config

RATES = {
    "steps": 1, "step_seconds": {"data": 0.0, "compute": 1.0}, "samples_per_s": 1.0, "tokens_per_s": 1.0, "data_wait": 0.0,
    "peak_memory_bytes": 1, "peak_tflops": 1.0,
}  # fmt: skip


def row(step: int, compute: list[float], **more: Any) -> dict[str, Any]:
    zeros = [0.0] * len(compute)
    ranks = {"compute": compute, "data": zeros, "exchange": zeros}
    return {"kind": "train", "step": step, "loss": 1.0, "ranks": ranks, **RATES, "peak_source": "a sheet", **more}


def page_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    config: Config = small_config(folder)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return write_report(config.run_dir).read_text(encoding="utf-8")


def test_each_rank_has_a_curve_and_slow_ranks_a_line(tmp_path: Path) -> None:
    slow = [{"rank": 1, "host": "<node-7>", "factor": 1.4}]
    rows = [row(10, [1.0]), row(20, [1.0, 1.4]), row(30, [1.0, 1.5], slow_ranks=slow)]
    axes = [figure.axes[0] for figure in ranks_figures(rows)]
    assert [len(axis.lines) for axis in axes] == [2, 2, 2]
    assert list(axes[0].lines[1].get_xdata()) == [20, 30]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page_of(tmp_path, rows))
    assert cells == ["30", "1", "&lt;node-7&gt;", "1.40 x"]
    assert "No rank was slow" in page_of(tmp_path, [row(1, [1.0, 1.0])])


def test_a_run_of_one_process_has_none(tmp_path: Path) -> None:
    alone = row(1, [1.0])
    del alone["ranks"]
    assert ranks_figures([alone]) == [] and "<h2>Ranks</h2>" not in page_of(tmp_path, [alone])
