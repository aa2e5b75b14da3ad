"""The pages in a real browser, narrow and wide, light and dark: nothing is cut off, all text is legible, and the policy refuses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmspeed.cli.check import check_config
from mmspeed.config import Config, dump_config, make_config
from mmspeed.pipelines import write_report
from tests.support.chromium import View, browser, views
from tests.support.media import make_zoo, zoo_tree
from tests.support.runs import small_config
from tests.unit.memory.test_memory_report import example

PROGRAM = browser()
WIDTHS = (1280, 400)

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the path (or in the variable CHROMIUM)")


def run_page(folder: Path) -> Path:
    """The page of a run that has all parts: curves, slow ranks with long names, memory, and a config."""
    config: Config = small_config(folder)
    run = config.run_dir
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    (run / "memory.json").write_text(json.dumps({"report": example().to_json(), "choice": []}))
    slow = [{"rank": 1, "host": "a-node-with-a-very-long-name." * 4 + "example.org", "factor": 1.4}]
    ranks = {"compute": [1.0, 1.4], "data": [0.1, 0.1], "exchange": [0.2, 0.0]}
    rates = {
        "steps": 1, "step_seconds": {"data": 0.1, "compute": 20.0}, "samples_per_s": 12.5, "tokens_per_s": 123456.0, "mfu": 0.31,
        "data_wait": 0.01,
    }  # fmt: skip
    rates |= {"peak_memory_bytes": 3.2e10, "peak_tflops": 989.0}
    parts = {"by_bucket": {"13x96x160": 1.5, "1x96x160": 1.0}, "by_quarter": [1.0, 1.2, 1.4, 2.0]}
    layer = "model.a_role_with_a_long_name.layers.2.mlp.gate"
    loads = {name: {"by_layer": [1.2, 2.5, 1.1], "worst": layer} for name in ("expert_load", "rank_load")}
    loads["waits"] = {"experts": [0.1, 0.0], "end": [0.05, 0.0]}
    named = {"peak_source": "data sheet of a device with a long name", "terms": {"velocity": 1.0, "balance": 0.1}}
    rows = [
        {
            "kind": "train", "step": step, "loss": 2.0 / step, "ranks": ranks, "slow_ranks": slow, **rates, **parts,
            **named, **loads,
        }
        for step in (10, 20, 30)
    ]  # fmt: skip
    held_out = {"kind": "validation", "by_quantile": [0.1, 0.2, 0.3, 0.4]}
    rows += [{**held_out, "step": 10, "loss": 0.1}, {**held_out, "step": 30, "loss": 0.2}]
    (config.run_dir.parent / f"{config.name}-data.html").touch()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(run)


def data_page(folder: Path) -> Path:
    """The page of a data set with media of every kind, and a source with a long name that is rejected."""
    make_zoo(folder / "zoo")
    (folder / "zoo" / f"{'long' * 40}.mp4").write_bytes(b"")
    (folder / "zoo" / f"{'long' * 40}.txt").write_text("unbroken" * 100)
    config = make_config(zoo_tree(folder), origin="test")
    page = folder / "data.html"
    check_config(config, page, None, None)
    return page


def scored_page(folder: Path) -> Path:
    """The page of clips with scores, thresholds of two columns, one with a long name, and mirror images."""
    long = "aesthetic_" * 12
    limits = (f"data.min={{motion: 1.5, {long}: 5.25}}", f"data.max={{{long}: 6.5}}", "data.mirror=true")
    config: Config = small_config(folder, *limits, clips=4)
    manifest = Path(config.data.sources[0].path)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    scores = [{"motion": 1 + number, long: 5 + number / 3} for number in range(len(rows))]
    manifest.write_text("".join(json.dumps({**row, **own}) + "\n" for row, own in zip(rows, scores, strict=True)))
    page = folder / "scored.html"
    check_config(config, page, None, None)
    return page


def named(seen: Sequence[View]) -> list[str]:
    """What is wrong in views, a line each."""
    return [
        f"{view.page} at {view.width}, {view.scheme}: {name} {value}"
        for view in seen
        for name, value in (
            ("messages", view.messages),
            ("beyond the edge", view.beyond),
            ("wider than the window", view.content if view.content > view.width else None),
            ("faint", view.faint),
            ("torn", view.torn),
            ("pictures not shown", view.unseen_pictures),
            ("plots too small to read", view.shrunk),
        )
        if value
    ]


@needs_browser
def test_pages_fit_their_windows_and_are_legible(tmp_path: Path) -> None:
    assert PROGRAM is not None
    pages = [run_page(tmp_path / "run"), data_page(tmp_path / "data"), scored_page(tmp_path / "scored")]
    seen = views(PROGRAM, pages, WIDTHS)
    if shots := os.environ.get("MMSPEED_SCREENSHOTS"):
        for view in seen:
            (Path(shots) / f"{view.page}-{view.width}-{view.scheme}.png").write_bytes(view.png)
    assert {(view.width, view.scheme) for view in seen} == {(w, s) for w in WIDTHS for s in ("light", "dark")}
    assert named(seen) == []
