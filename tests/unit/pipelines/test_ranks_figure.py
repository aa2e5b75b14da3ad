"""The report's parts about ranks and experts, from rows as runs write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mmspeed.config import Config, dump_config
from mmspeed.pipelines.report.run_page import experts_figures, ranks_figures, write_report
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


def test_waits_are_drawn_by_place(tmp_path: Path) -> None:
    rows = [
        row(10, [1.0, 1.0], waits={"end": [0.1, 0.2]}),
        row(20, [1.0, 1.0], waits={"experts": [0.3, 0.0], "end": [0.1, 0.2]}),
    ]
    figures = {figure.axes[0].get_title(): figure.axes[0].lines for figure in ranks_figures(rows)}
    curves = [list(line.get_ydata()) for line in figures["waiting at experts, s a step"]]
    assert curves == [[0.0, 0.3], [0.0, 0.0]] and len(figures) == 5


def test_loads_of_experts_and_devices_have_curves_and_a_table(tmp_path: Path) -> None:
    loads = [{"by_layer": [1.0, 2.0, 3.0], "worst": "layers.2"}, {"by_layer": [1.5, 1.25, 1.0], "worst": "layers.0"}]
    rows = [
        row(10, [1.0], expert_load=loads[0]),
        row(20, [1.0], expert_load=loads[0], rank_load=loads[1]),
        row(30, [1.0]),
    ]
    experts, devices, layers = (figure.axes[0].lines for figure in experts_figures(rows))
    assert [list(line.get_xdata()) for line in (experts[0], devices[0], layers[1])] == [[10, 20], [20], [1, 2, 3]]
    assert [round(float(line.get_ydata()[-1]), 3) for line in experts] == [2.0, 2.9, 3.0]
    assert list(layers[0].get_ydata()) == [1.0, 2.0, 3.0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page_of(tmp_path, rows))
    assert cells == ["hottest expert, step 20", "2.00", "2.90", "3.00", "layers.2", "hottest device, step 20", "1.25", "1.48", "1.50", "layers.0"]  # fmt: skip
    assert experts_figures(rows[2:]) == [] and "<h2>Experts</h2>" not in page_of(tmp_path, rows[2:])


def test_a_run_of_one_process_has_none(tmp_path: Path) -> None:
    alone = row(1, [1.0])
    del alone["ranks"]
    assert ranks_figures([alone]) == [] and "<h2>Ranks</h2>" not in page_of(tmp_path, [alone])
