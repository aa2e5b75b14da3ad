"""The command line in real processes: what it prints, its exit codes, and that mistakes are reported in a line or two."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mmspeed.__main__ import main
from mmspeed.cli.app import split_debug
from mmspeed.cli.diagnosis import Diagnosis
from mmspeed.cli.doctor import diagnose, render, to_json
from mmspeed.cli.failures import describe
from mmspeed.cli.launch import explain, wanted, worth_a_restart
from mmspeed.config import load_config
from mmspeed.errors import UserError
from mmspeed.version import __version__


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m mmspeed` outside any launcher."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 100, **options}
    return subprocess.run([sys.executable, "-m", "mmspeed", *arguments], text=True, env=environment, **settings)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A config as `mmspeed init` writes it."""
    assert main(["init", str(tmp_path / "my-run")]) == 0
    return tmp_path / "my-run.yaml"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("init", "check", "preprocess", "train", "sample", "report", "demo", "doctor", "plan", "cache", "bench")
    for arguments in (["--help"], []):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in names)
    for name in (*names[:9], "bench comm", "cache stat"):
        assert main([*name.split(), "-h"]) == 0
        assert f"mmspeed {name}" in capsys.readouterr().out
    for group in ("cache", "bench"):
        assert main([group]) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"Usage: mmspeed {group}") and "\nCommands:\n" in text and "mmspeed: error" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmspeed {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "x.yaml", "--fast"], "No such option: --fast"),
        (["sample", "run", "--prompt", "a", "--steps", "0"], "--steps"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("mmspeed: error: ") and line.count("\n") == 1 and expected in line and "--help" in line


def test_user_errors_are_one_line_and_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "none.yaml"]) == 1
    plain = capsys.readouterr().err
    assert plain == "mmspeed: error: none.yaml: no such config file; `mmspeed init none.yaml` writes one\n"
    for arguments in (
        ["--debug", "train", "none.yaml"],
        ["train", "none.yaml", "--debug"],
        ["train", "--debug", "none.yaml"],
    ):
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback") and shown.endswith(plain)


def test_debug_is_taken_from_anywhere_but_behind_two_dashes() -> None:
    assert split_debug(["train", "--debug", "x"]) == (["train", "x"], True)
    assert split_debug(["train", "--", "--debug"]) == (["train", "--", "--debug"], False)


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (UserError("mend this"), "error: mend this", 1),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "error: a/b: no space left", 1),
        (OSError(errno.EMFILE, "Too many open files", "a"), "ulimit -n", 1),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "error: a/b: Permission denied", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (MemoryError("could not allocate"), "out of memory; lower train.micro_batch_size", 1),
        (torch.OutOfMemoryError("tried to allocate 9 GB\nmore"), "tried to allocate 9 GB", 1),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), "'wandb'", 1),
        (
            ZeroDivisionError("division by zero"),
            "internal error: ZeroDivisionError: division by zero (run again with --debug",
            1,
        ),
        (
            ModuleNotFoundError("No module named 'mmspeed.x'", name="mmspeed.x"),
            "internal error: ModuleNotFoundError",
            1,
        ),
    ],
)
def test_exceptions_as_lines(error: BaseException, expected: str, code: int) -> None:
    failure = describe(error)
    assert expected in failure.line() and failure.line().count("\n") <= 1
    assert failure.code == code
    assert failure.known is ("internal" not in expected)


def test_a_full_disk_behind_standard_output(run_file: Path) -> None:
    with open("/dev/full", "w") as full:
        done = command("train", str(run_file), "--print-config", stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("mmspeed: error: no space left") and done.stderr.count("\n") == 1


def test_print_config_is_the_resolved_config(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    overrides = ["train.lr=2e-4", "data.buckets.0.frames=33"]
    assert main(["train", str(run_file), overrides[0], "--nproc", "2", "--print-config", overrides[1]]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed, encoding="utf-8")
    assert load_config(again) == load_config(run_file, overrides)
    assert yaml.safe_load(printed)["train"]["lr"] == 2e-4


def test_nproc_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted(2) and not wanted(1) and not wanted(None)
    with pytest.raises(UserError, match="--nproc is 0"):
        wanted(0)
    monkeypatch.setenv("RANK", "0")
    assert not wanted(4)


def failure(code: int, data: dict[str, Any] | None = None, timestamp: int = 5) -> Any:
    """A failed process as torch's launcher reports it."""
    name = "SIGKILL" if code == -9 else "SIGABRT"
    return SimpleNamespace(
        exitcode=code, error_file_data=data or {"message": "<NONE>"}, timestamp=timestamp, signal_name=lambda: name
    )


def test_the_cause_is_shown_and_not_its_echoes() -> None:
    mistake = {"message": "mmspeed: error: the disk is full", "known": True, "code": 1}
    echo = {"message": "mmspeed: internal error: connection closed", "known": False, "code": 1}
    line, code = explain({0: failure(1, echo, 3), 1: failure(1, mistake, 4), 2: failure(-6)})
    assert (line, code) == ("mmspeed: error: the disk is full", 1)
    assert "process 2 was killed by SIGKILL" in explain({0: failure(1, echo, 3), 2: failure(-9), 3: failure(-15)})[0]
    assert explain({0: failure(1, echo, 6), 1: failure(1, echo, 5)})[0].startswith("[rank 1] mmspeed: internal error")
    assert "process 3 was killed by SIGKILL; often the machine ran out of memory" in explain({3: failure(-9)})[0]
    assert "process 1 ended with exit code 7" in explain({1: failure(7)})[0]


def test_each_end_of_a_rank_is_called_what_it_is() -> None:
    lost = {"message": "mmspeed: error: lost the connection", "known": False, "code": 1, "kind": "connection"}
    hang = {"message": "mmspeed: error: rank 2 (host) was ended: step 3", "known": False, "code": 70, "kind": "hang"}
    memory = {"message": "mmspeed: error: out of memory", "known": True, "code": 1, "kind": "memory"}
    assert explain({0: failure(1, lost, 1), 1: failure(1)})[0].startswith(
        "mmspeed: error: process 1 ended with exit code"
    )
    assert explain({0: failure(1, lost, 1), 2: failure(70, hang, 9)})[0].startswith(
        "[rank 2] mmspeed: error: rank 2 (host)"
    )
    assert explain({0: failure(1, lost)})[0] == "[rank 0] mmspeed: error: lost the connection"
    assert explain({0: failure(1, lost), 3: failure(1, memory)})[0] == "[rank 3] mmspeed: error: out of memory"
    assert "compiled code" in explain({0: failure(1, lost), 1: failure(-11)})[0]
    by_launcher = {0: failure(70, hang, 5), 1: failure(-9, timestamp=36)}  # it was stopped, so SIGTERM did not end it
    assert explain(by_launcher)[0].startswith("[rank 0] mmspeed: error: rank 2 (host) was ended")
    own = {"message": "mmspeed: internal error: x", "known": False, "code": 1, "kind": "program"}
    assert explain({0: failure(1, own, 5), 1: failure(-9, timestamp=36)})[0].startswith("[rank 0] mmspeed: internal")
    assert "SIGKILL" in explain({0: failure(1, own, 5), 1: failure(-9, timestamp=5)})[0]
    gloo = describe(RuntimeError("[gloo/pair.cc:537] Connection closed by peer [127.0.0.1]:12"))
    assert gloo.kind == "connection" and "lost the connection to another rank" in gloo.text and not gloo.known
    assert describe(MemoryError()).kind == "memory" and describe(KeyError("x")).kind == "program"


def test_what_the_user_has_to_correct_is_not_tried_again() -> None:
    mistake = {"message": "mmspeed: error: the disk is full", "known": True, "code": 1, "kind": "input"}
    assert not worth_a_restart({1: failure(1, mistake), 0: failure(-9)})
    assert worth_a_restart({1: failure(1, mistake | {"kind": "memory"})})
    assert worth_a_restart({0: failure(-9)}) and worth_a_restart({0: failure(1)})


def test_restarts_are_those_of_this_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert wanted(None, 2) and wanted(1, 2) and not wanted(None, 0) and not wanted(1)
    with pytest.raises(UserError, match="--max-restarts is -1: use 0 or more"):
        wanted(2, -1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="write it behind torchrun"):
        wanted(None, 2)


def test_doctor_sees_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspeed.cli.doctor._other_decoders", list)  # to import them takes processes of seconds
    checks = {check.name: check for check in diagnose(tmp_path)}
    assert checks["torch"].found == torch.__version__ and checks["torch"].state == "ok"
    assert {"python", "cpu", "memory", "disk", "PyAV", "MiniLM", "trackers", "open files"} <= set(checks)
    assert all(check.advice for check in checks.values() if check.state != "ok")


def test_doctor_as_text_and_json() -> None:
    checks = [Diagnosis("torch", "ok", "2.13"), Diagnosis("MiniLM", "warn", "not installed", "pip install it")]
    text = render(checks)
    assert "warn    MiniLM  not installed" in text and "-> pip install it" in text and "warnings: 1" in text
    body = json.loads(to_json(checks))
    assert body["ok"] and body["checks"][1]["advice"] == "pip install it"
    broken = [*checks, Diagnosis("PyAV", "missing", "cannot be imported", "pip install av")]
    assert not json.loads(to_json(broken))["ok"] and "1 missing" in render(broken)


@pytest.mark.slow
def test_doctor_runs(tmp_path: Path) -> None:
    done = command("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mmspeed"] == __version__
