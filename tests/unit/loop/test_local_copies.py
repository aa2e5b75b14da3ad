"""Copies of checkpoints on a local disk, in one process: sealed, few, of one run alone, and a failure is a line."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from mmspeed.loop.checkpoint.maintenance import verify
from mmspeed.loop.checkpoint.manager import (
    CheckpointManager,
    DamagedCheckpointError,
    TrainingState,
    step_name,
    steps_in,
)
from tests.support.toy import ToyDiT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(step: int) -> TrainingState:
    return TrainingState(ToyDiT(seed=step))


def begun(folder: Path, *steps: int, keep: int = 1) -> CheckpointManager:
    """A run in `folder/run` with copies in `folder/disk`, after it has saved some steps."""
    manager = CheckpointManager(folder / "run", keep_last=9, local=folder / "disk", keep_local=keep)
    for step in steps:
        manager.save(step, state_of(step), blocking=True)
    return manager


def copies(manager: CheckpointManager) -> list[int]:
    assert manager.local is not None
    return steps_in(manager.local.folder)


def test_the_newest_are_on_the_local_disk_sealed_and_a_restart_takes_them(tmp_path: Path) -> None:
    assert copies(begun(tmp_path, 1, 2, 3, keep=2)) == [2, 3]
    shutil.rmtree(tmp_path / "run" / step_name(3))  # as after a kill before the shared one was written
    again = begun(tmp_path, keep=2)
    copy = again.newest_copy(step_name(2))
    assert copy is not None and copy.name == step_name(3) and verify(copy) == []
    model = ToyDiT(seed=9)
    again.check(copy)
    assert again.load(copy, model)["step"] == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ToyDiT(seed=3).parameters(), strict=True))
    again.save(4, state_of(4), blocking=True)
    assert copies(again) == [3, 4] and again.newest_copy(step_name(5)) is None


def test_copies_of_another_run_are_not_taken(tmp_path: Path) -> None:
    first = begun(tmp_path, 5)
    assert first.local is not None
    shutil.rmtree(tmp_path / "run")  # a new run of the same name
    other = begun(tmp_path, 1)
    assert other.local is not None and other.newest_copy(step_name(1)) is not None
    shutil.copytree(first.local.folder / step_name(5), other.local.folder / step_name(5))
    newest = other.newest_copy(step_name(1))
    assert newest is not None and newest.name == step_name(1)


def test_a_damaged_copy_is_noticed_and_the_shared_one_is_read(tmp_path: Path) -> None:
    manager = begun(tmp_path, 1)
    copy = manager.newest_copy(step_name(1))
    assert copy is not None
    path = next(copy.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="are not those that were written"):
        manager.load(copy, ToyDiT())
    assert manager.load(tmp_path / "run" / step_name(1), ToyDiT())["step"] == 1


def test_returning_to_an_earlier_step_forgets_later_copies(tmp_path: Path) -> None:
    manager = begun(tmp_path, 1, 2)
    manager.load(tmp_path / "run" / step_name(1), ToyDiT())
    assert copies(manager) == [] and manager.newest_copy(step_name(1)) is None


def test_a_local_disk_that_cannot_be_written_is_a_line_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = begun(tmp_path)
    (tmp_path / "disk").write_text("no folder")
    with caplog.at_level(logging.WARNING, "mmspeed"):
        manager.save(1, state_of(1), blocking=True)
    assert manager.local is not None and manager.local.failures == 1
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mmspeed")]
    assert len(lines) == 1 and "no copy on the local disk" in lines[0] and "Not a directory" in lines[0]
    assert verify(tmp_path / "run" / step_name(1)) == []
