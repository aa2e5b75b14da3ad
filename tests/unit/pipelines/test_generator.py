"""The generator of a run's draws: recorded when it begins, kept for all purposes when it goes on, by videos sampled from it too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import latest, open_checkpoint
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.rng.first import TorchStream
from mmspeed.rng.philox import PhiloxStream
from tests.support.runs import small_config

PROMPT = "a rabbit in a meadow"
PURPOSES = {
    *("caption", "caption_dropout", "init", "noise", "posterior", "sample", "sample_order", "step_order", "timestep"),
    *("turn", "val_noise", "variant"),
}


def run_config(small_cache: Path, folder: Path, steps: int = 2) -> Config:
    """A run with held-out loss, a sampled prompt and dropped captions."""
    home = folder / "home"
    if not home.exists():
        shutil.copytree(small_cache, home)
    return small_config(
        home, f"train.steps={steps}", "train.loader_workers=0", "train.caption_dropout=0.5", "validate.every=2",
        f"validate.prompts=[{PROMPT}]",
    )  # fmt: skip


def purposes_drawn(monkeypatch: pytest.MonkeyPatch, kind: type) -> set[Any]:
    """A set that the purposes of this kind's streams are added to from now on."""
    drawn, begin = set[Any](), kind.__init__

    def watched(self: Any, seed: int, purpose: Any, *names: object) -> None:
        drawn.add(purpose)
        begin(self, seed, purpose, *names)

    monkeypatch.setattr(kind, "__init__", watched)
    return drawn


def versions(path: Path) -> Any:
    return json.loads((path / "run.json").read_text(encoding="utf-8")).get("versions")


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_all_draws_of_a_run_are_by_its_generator(
    before: bool, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(small_cache, tmp_path)
    if before:  # begun by an mmspeed that recorded no version
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "run.json").write_text("{}", encoding="utf-8")
    kinds = (TorchStream, PhiloxStream) if before else (PhiloxStream, TorchStream)
    own, other = (purposes_drawn(monkeypatch, kind) for kind in kinds)
    TrainPipeline(config).run()
    TextToVideo.from_run(config.run_dir, device="cpu")([PROMPT], seed=3)
    assert other == set() and own >= {"init", "noise", "timestep", "caption_dropout", "sample", "val_noise"}
    assert own <= PURPOSES, "docs/randomness.md lists them"
    version = 1 if before else 2
    checkpoint = latest(config.run_dir / "checkpoints")
    assert checkpoint is not None
    assert versions(config.run_dir) == open_checkpoint(checkpoint)[0]["meta"]["versions"] == {"generator": version}
    # and it goes on so, even when run.json is lost
    (config.run_dir / "run.json").unlink()
    TrainPipeline(run_config(small_cache, tmp_path, steps=3)).run()
    assert other == set() and versions(config.run_dir) == {"generator": version}


def test_a_run_of_a_newer_mmspeed_is_refused(small_cache: Path, tmp_path: Path) -> None:
    config = run_config(small_cache, tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.json").write_text('{"versions": {"generator": 3}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"run\.json draws with generator 3, and this mmspeed has 1 to 2"):
        TrainPipeline(config).run()


def test_a_folder_without_a_run_begins_with_the_newest(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).generator() == 2
    (tmp_path / "run.json").write_text("{", encoding="utf-8")  # damaged before there was a checkpoint
    assert RunFolder(tmp_path).generator() == 2
