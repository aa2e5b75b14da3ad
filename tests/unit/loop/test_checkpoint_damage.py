"""Checkpoint folders that something else than mmspeed changed: each damage has its line, and none is an internal error."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.loop.checkpoint.manager import (
    CheckpointManager,
    TrainingState,
    best,
    latest,
    load,
    recorded,
    step_name,
    steps_in,
)
from tests.support.toy import ToyDiT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4; the one of step 2 has the lower validation loss."""
    manager = CheckpointManager(tmp_path)
    for step, loss in ((2, 0.5), (4, 0.7)):
        manager.save(step, TrainingState(ToyDiT()), blocking=True)
        manager.mark_best(step, loss)
    return tmp_path


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("mmspeed"), "propagate", True)  # a command line run earlier turns it off
    return caplog


@pytest.mark.parametrize("text", ['{"checkpoints": [{"st', '{"checkpoints": [3]}'])
def test_a_damaged_record_is_rebuilt_with_one_warning(
    folder: Path, text: str, warnings: pytest.LogCaptureFixture
) -> None:
    (folder / "latest.json").write_text(text, encoding="utf-8")
    assert latest(folder) == folder / step_name(4)
    warnings.clear()
    manager = CheckpointManager(folder)
    assert manager.latest() == folder / step_name(4) and best(folder) is None
    (line,) = warnings.messages
    assert "latest.json" in line and str(folder) in line and "losses are lost" in line
    assert json.loads((folder / "latest.json").read_text())["latest"] == step_name(4)


@pytest.mark.parametrize("name", ["index.json", "meta.json"])
@pytest.mark.parametrize("text", ["[]", '{"format": 1, "files": {}, "tensors": {"a": 3}}', "\udcff"])
def test_damaged_json_is_reported_with_the_way_on(folder: Path, name: str, text: str) -> None:
    (folder / step_name(4) / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=rf"step-00000004 is damaged: {name}.*delete that folder to go on from step 2"):
        load(folder / step_name(4), ToyDiT())


def test_a_newer_format_is_no_damage(folder: Path) -> None:
    (folder / step_name(4) / "meta.json").write_text('{"format": 2}')
    (folder / step_name(4) / "index.json").write_text("{}")
    (folder / step_name(4) / "seal.json").unlink()
    with pytest.raises(UserError, match=r"has format 2.*update mmspeed"):
        load(folder / step_name(4), ToyDiT())


def test_folders_of_the_users_own_are_left_alone(folder: Path) -> None:
    for name in ("step-old", "step-3", "step-", "step-00000005.bak"):
        (folder / name).mkdir()
        (folder / name / "meta.json").write_text("{}")
    assert steps_in(folder) == [2, 4] and [entry["step"] for entry in recorded(folder)] == [2, 4]
    manager = CheckpointManager(folder, keep_last=1)
    manager.save(6, TrainingState(ToyDiT()), blocking=True)
    assert steps_in(folder) == [2, 6] and (folder / "step-old" / "meta.json").exists()
    with pytest.raises(UserError, match="step-old is damaged"):
        manager.load(folder / "step-old", ToyDiT())


def test_a_folder_without_meta_is_named_when_it_is_passed_over(
    folder: Path, warnings: pytest.LogCaptureFixture
) -> None:
    assert latest(folder) == folder / step_name(4) and not warnings.messages
    (folder / step_name(4) / "meta.json").unlink()
    assert latest(folder) == folder / step_name(2)
    (line,) = warnings.messages
    assert str(folder / step_name(4)) in line and "no meta.json" in line


@pytest.mark.parametrize("row", ["[1]", '{"step": 2'])
def test_metrics_are_objects(tmp_path: Path, row: str) -> None:
    expected: list[dict[str, Any]] = [{"step": 1}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(expected[0])}\n{row}\n{json.dumps(expected[1])}\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == expected
