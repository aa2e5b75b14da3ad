"""The page of a run: numbers of all its sessions, and what to do next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.cli.app import run
from tests.unit.pipelines.test_ranks_figure import page_of, row


def test_rates_and_time_are_of_all_sessions(tmp_path: Path) -> None:
    first = {"samples_per_s": 4.0, "step_seconds": {"data": 1.0, "compute": 2.0}, "peak_memory_bytes": 3000}
    rows = [row(10, [1.0], **first), row(12, [1.0], samples_per_s=1.0, step_seconds={"data": 0.0, "compute": 15.0})]
    tiles = re.findall(r"<b>(.*?)</b><span>(.*?)</span>", page_of(tmp_path, rows))
    numbers = {label: number for number, label in tiles}
    assert numbers["training time"] == "1 min 0 s" and numbers["samples/s"] == "2.50"
    assert numbers["peak memory"] == "3.0 kB" and numbers["MFU"] == "unknown"


def test_a_held_out_loss_that_rises_has_a_sentence(tmp_path: Path) -> None:
    losses = ((5, 0.5), (10, 0.7), (15, 0.505))
    rows = [row(15, [1.0]), *({"kind": "validation", "step": step, "loss": loss} for step, loss in losses)]
    assert "was lowest at step 5 (0.5000) and is 0.7000 at step 10" in page_of(tmp_path, rows[:3])
    assert "was lowest" not in page_of(tmp_path, rows)


def test_a_run_without_a_checkpoint_is_told_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, folder = page_of(tmp_path, []), tmp_path / "runs" / "small"
    assert f"a file {folder}/save makes one" in page and "mmspeed sample" not in page and "data.html" not in page
    assert run(["report", str(folder)]) == 0
    error = capsys.readouterr().err
    assert "SIGTERM, SIGUSR1, Ctrl-C" in error and "Without them step 6 is the first" in error and "next:" not in error
    saved = folder / "checkpoints" / "step-00000006"
    saved.mkdir(parents=True)
    (saved / "meta.json").touch()
    (tmp_path / "runs" / "small-data.html").touch()
    page = page_of(tmp_path, [])
    assert f"<pre>mmspeed sample {folder} --prompt" in page and 'href="../small-data.html"' in page
