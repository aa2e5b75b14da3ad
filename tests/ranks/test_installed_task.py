"""A task of an installed package, trained by the plain command line: in several processes, which all know it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mmspeed.log import read_metrics
from tests.support.character_runs import character_config, character_tree, losses, train_characters
from tests.support.packages import CHARACTERS_PACKAGE, CHARACTERS_PROJECT

ROOT = Path(__file__).resolve().parents[2]
PIP = ["pip", "--disable-pip-version-check", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What runs `python -m` with these words where the package is installed, and gives its standard error."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    (project / "pyproject.toml").write_text(CHARACTERS_PROJECT, encoding="utf-8")
    (project / "character_pack.py").write_text(CHARACTERS_PACKAGE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=300, cwd=site
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    call(*PIP, "--target", str(site), str(project))
    assert [each.name for each in site.glob("*.dist-info")] == ["character_pack-0.3.dist-info"]
    return call


@pytest.mark.slow
def test_processes_of_nproc_and_torchrun_know_it(command: Callable[..., str], tmp_path: Path) -> None:
    """Two processes by `--nproc` train three steps, two of torchrun go on; losses are those of one process."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(character_tree(tmp_path)), encoding="utf-8")
    command("mmspeed", "train", str(path), "train.steps=3", "--nproc", "2")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    command(*launcher, "mmspeed", "train", str(path))
    config = character_config(tmp_path)
    shared = read_metrics(config.run_dir / "metrics.jsonl")
    assert [row["step"] for row in shared if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    train_characters(str(tmp_path), ("name=alone",))
    # sums of the same numbers in another order, in six steps of 1e-3: a few eps
    assert losses(config) == pytest.approx(losses(character_config(tmp_path, "name=alone")), rel=1e-5)


@pytest.mark.slow
def test_processes_of_a_check_know_it(command: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(character_tree(tmp_path)), encoding="utf-8")
    command("mmspeed", "check", str(path), "--parallel", "dp_shard=2")
