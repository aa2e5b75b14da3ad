"""The campaign itself: quick cases of it, its table, and its exit code where a case falls short, raises, hangs or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.campaign import all_cases, main
from tests.faults.case import Case, Outcome, Scene, case

KINDS = (
    "preprocess killed", "training killed", "ranks of 2 killed", "launcher killed", "SIGSTOP", "disk full",
    "only be read", "damages to a cache", "damages to checkpoints", "NaN", "1e38", "another config, cache, code", "media",
    "archives", "YAML", "captions", "spike", "change under",
)  # fmt: skip


def test_cases_of_every_kind_are_there_under_names_of_their_own() -> None:
    names = [one.name for one in all_cases()]
    assert len(set(names)) == len(names)
    assert [kind for kind in KINDS if not any(kind in name for name in names)] == []


def test_quick_cases_pass_and_fill_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cover = "damages to checkpoints,archives"
    assert main(["--only", cover, "--seed", "3", "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "faults.json").read_text())
    assert record["seed"] == 3 and len(record["rows"]) == 2 and all(row["passed"] for row in record["rows"])
    assert "2 of 2 cases pass, seed 3" in capsys.readouterr().out
    table = (tmp_path / "faults.md").read_text()
    assert "| random damages to checkpoints | 100 of 100 noticed by `verify` and at loading | yes |" in table


@case("falls short")
def falls_short(scene: Scene) -> Outcome:
    return "3 of 4", False


@case("raises")
def raises(scene: Scene) -> Outcome:
    raise ValueError(f"a fault in {scene.folder.name}")


@case("hangs", seconds=0.3)
def hangs(scene: Scene) -> Outcome:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (scene.folder / "child").write_text(str(child.pid))
    Path(os.environ["MMSPEED_TEST_CHILD"]).write_text(str(child.pid))
    time.sleep(1000)
    return "", True


@case("dies")
def dies(scene: Scene) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    return "", True


@case("passes")
def passes(scene: Scene) -> Outcome:
    return f"draws {scene.draw.randrange(1000)}, {'full' if scene.full else 'few'}", True


def test_a_case_that_fails_in_any_way_is_a_row_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMSPEED_TEST_CHILD", str(tmp_path / "child"))
    cases: list[Case] = [falls_short, raises, hangs, dies, passes]
    assert main(["--output", str(tmp_path), "--full"], cases) == 1
    rows = {row["test"]: row for row in json.loads((tmp_path / "faults.json").read_text())["rows"]}
    assert {name: row["passed"] for name, row in rows.items()} == {one.name: one is passes for one in cases}
    assert rows["raises"]["figure"] == "raised ValueError: a fault in scene"
    assert rows["hangs"]["figure"] == "hung: no result after 0 s"
    assert rows["dies"]["figure"] == "ended with exit code -9 and no result"
    assert "1 of 5 cases pass" in capsys.readouterr().out
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}/exe").exists(), "it left a process behind"
    figure = rows["passes"]["figure"]
    assert main(["--output", str(tmp_path), "--full"], [passes]) == 0
    assert json.loads((tmp_path / "faults.json").read_text())["rows"][0]["figure"] == figure, "a seed, the same faults"
    assert main(["--output", str(tmp_path), "--only", "no such case"], cases) == 2
