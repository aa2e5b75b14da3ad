"""`mmspeed bench` of what proves claims: run from a checkout, refused in one line by an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mmspeed
from mmspeed.cli.app import run
from mmspeed.cli.bench_app import from_checkout

CLAIMS = ["overfit", "loader", "lm", "index", "preprocess", "sp", "buckets --simulate", "sparse-training"]


@pytest.mark.parametrize("command", CLAIMS)
def test_an_installed_package_says_in_one_line_that_a_checkout_is_needed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mmspeed, "__file__", str(tmp_path / "site-packages" / "mmspeed" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *command.split()]) != 0
    said = capsys.readouterr().err
    assert f"`mmspeed bench {command}` proves a claim" in said and "checkout" in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_checkout_comes_first_among_the_places_of_imports(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    from_checkout("loader")
    from_checkout("loader")
    assert sys.path == [str(root), "elsewhere"]
