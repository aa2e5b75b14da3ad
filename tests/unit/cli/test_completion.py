"""Words for shells: by the real program as a shell asks it, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmspeed.__main__ import main
from mmspeed.cli import completion


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and two runs."""
    for run in ("runs/fox", "runs/fish"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "my-run.yaml").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_completed_as_they_are_typed(folder: Path) -> None:
    assert completion.run_folders("") == ["runs/fish", "runs/fox"]
    assert completion.run_folders("./runs/fo") == ["./runs/fox"]
    assert completion.run_folders("ru") == ["runs/"] and completion.run_folders("none/") == []


def test_configs_and_tasks_are_completed(folder: Path) -> None:
    assert completion.config_files("") == ["my-run.yaml", "runs/"]
    assert completion.config_files("my") == ["my-run.yaml"]
    assert completion.tasks("vi") == ["video"] and completion.checkpoints("b") == ["best"]


def test_a_shell_gets_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # make runs tests from sh
    assert main(["--show-completion", "bash"]) == 0
    assert "complete -o default -F _mmspeed_completion mmspeed" in capsys.readouterr().out


def test_the_program_answers_a_shell_without_torch(folder: Path) -> None:
    asked = {"_MMSPEED_COMPLETE": "complete_bash", "COMP_WORDS": "mmspeed sample runs/fo", "COMP_CWORD": "2"}
    code = "import sys; from mmspeed.cli.app import run\ntry: run([])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["runs/fox"], "")
