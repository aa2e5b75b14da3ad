"""The report's part about ranks, from rows as runs write them."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from mmspeed.pipelines.report.ranks_part import ranks_part


def row(step: int, compute: list[float], **more: Any) -> dict[str, Any]:
    zeros = [0.0] * len(compute)
    return {"kind": "train", "step": step, "ranks": {"compute": compute, "data": zeros, "exchange": zeros}, **more}


def test_each_rank_has_a_curve_and_slow_ranks_a_line() -> None:
    figures: list[Figure] = []

    def show(figure: Figure, caption: str) -> str:
        figures.append(figure)
        return "<figure/>"

    slow = [{"rank": 1, "host": "<node-7>", "factor": 1.4}]
    rows = [row(10, [1.0]), row(20, [1.0, 1.4]), row(30, [1.0, 1.5], slow_ranks=slow)]
    page = ranks_part(rows, show)
    (figure,) = figures
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 2]
    assert list(figure.axes[0].lines[1].get_xdata()) == [20, 30]
    assert "<td>30</td><td>1</td><td>&lt;node-7&gt;</td><td>1.40 x</td>" in page


def test_a_run_of_one_process_has_none() -> None:
    assert ranks_part([{"kind": "train", "step": 1}], lambda figure, caption: "x") == ""
    assert "No rank was slow" in ranks_part([row(1, [1.0, 1.0])], lambda figure, caption: "")
