"""The generator of a run's draws: recorded when it begins, and compared when it goes on and when videos are sampled from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import latest, open_checkpoint
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.rng import VERSION
from tests.support.runs import small_config


def run_config(small_cache: Path, folder: Path, steps: int = 2) -> Config:
    home = folder / "home"
    if not home.exists():
        shutil.copytree(small_cache, home)
    return small_config(home, f"train.steps={steps}", "train.loader_workers=0")


def versions(path: Path) -> Any:
    return json.loads((path / "run.json").read_text(encoding="utf-8")).get("versions")


@pytest.mark.slow
def test_a_run_records_its_generator(small_cache: Path, tmp_path: Path) -> None:
    config = run_config(small_cache, tmp_path)
    TrainPipeline(config).run()
    checkpoint = latest(config.run_dir / "checkpoints")
    assert checkpoint is not None
    assert versions(config.run_dir) == open_checkpoint(checkpoint)[0]["meta"]["versions"] == {"generator": VERSION}
    # and it goes on so, even when run.json is lost
    (config.run_dir / "run.json").unlink()
    TrainPipeline(run_config(small_cache, tmp_path, steps=3)).run()
    assert versions(config.run_dir) == {"generator": VERSION}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"versions": {"generator": 3}}, "draws with generator 3, this mmspeed with 2: use a newer mmspeed"),
        ({"versions": {"generator": 1}}, r"is a run of an earlier mmspeed \(generator 1\), which drew other numbers"),
        ({}, r"is a run of an earlier mmspeed \(generator 1\)"),
        ({"versions": "x"}, "generator x"),
    ],
)
def test_a_run_of_another_mmspeed_is_refused(
    record: dict[str, Any], words: str, small_cache: Path, tmp_path: Path
) -> None:
    config = run_config(small_cache, tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match=words) as error:
        TrainPipeline(config).run()
    assert "\n" not in str(error.value) and str(config.run_dir) in str(error.value)


def test_a_folder_without_a_run_is_taken(tmp_path: Path) -> None:
    RunFolder(tmp_path).check_generator()
    (tmp_path / "run.json").write_text("{", encoding="utf-8")  # damaged before there was a checkpoint
    RunFolder(tmp_path).check_generator()
