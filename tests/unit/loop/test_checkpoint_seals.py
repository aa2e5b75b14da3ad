"""Sealed checkpoints: what is written is what is read, and every damage is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import recorded
from mmspeed.loop.checkpoint.maintenance import entries, prunable, remove, verify
from mmspeed.loop.checkpoint.manager import (
    CheckpointManager,
    DamagedCheckpointError,
    Retention,
    best,
    latest,
    load,
    load_weights,
    step_name,
    steps_in,
)
from mmspeed.loop.checkpoint.storage import DamageError, read_record
from tests.support.damages import state_of, unnoticed, unseal, write_two
from tests.support.toy import ToyDiT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, with different weights and losses."""
    return write_two(tmp_path_factory.mktemp("sealed"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def test_a_sound_checkpoint_has_no_problem(folder: Path) -> None:
    assert verify(folder / step_name(2)) == verify(folder / step_name(4)) == []
    state = state_of(0)
    assert load(folder / step_name(4), state.model, state.optimizer, state.ema) == {"order": [4, 3], "step": 4}
    index = json.loads((folder / step_name(4) / "index.json").read_text())
    assert all(len(chunk["hash"]) == 32 for entry in index["tensors"].values() for chunk in entry["chunks"])


def test_random_damages_are_noticed(written: Path, tmp_path: Path) -> None:
    assert unnoticed(written, tmp_path / "copy", 60, 0) == []


@pytest.mark.slow
def test_two_thousand_damages_are_noticed(written: Path, tmp_path: Path) -> None:
    assert unnoticed(written, tmp_path / "copy", 2000, 1) == []


def test_every_byte_of_the_record_counts(folder: Path) -> None:
    data = (folder / "latest.json").read_bytes()
    assert [entry["loss"] for entry in read_record(folder)] == [0.5, 0.7]
    for place in range(len(data)):
        (folder / "latest.json").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DamageError):
            read_record(folder)


def test_a_checkpoint_of_another_run_is_noticed(folder: Path, tmp_path: Path) -> None:
    other = CheckpointManager(tmp_path / "other")
    other.save(4, state_of(4), blocking=True)
    shutil.rmtree(folder / step_name(4))
    shutil.copytree(tmp_path / "other" / step_name(4), folder / step_name(4))
    with pytest.raises(DamagedCheckpointError, match="belongs to another run"):
        load(folder / step_name(4), ToyDiT())
    alone = Path(shutil.copytree(tmp_path / "other" / step_name(4), tmp_path / "kept" / "good one"))
    load_weights(alone, ToyDiT())


def test_a_run_keeps_its_identity_without_its_record(folder: Path) -> None:
    (folder / "latest.json").unlink()
    CheckpointManager(folder).save(6, state_of(6), blocking=True)
    assert steps_in(folder) == [4, 6] and verify(folder / step_name(4)) == []


def test_a_checkpoint_without_hashes_is_refused_in_a_line(folder: Path) -> None:
    checkpoint = folder / step_name(4)
    unseal(checkpoint)
    words = f"checkpoint {checkpoint} is of an earlier mmspeed, which wrote no hashes: begin a new run"
    with pytest.raises(UserError, match=f"^{words}$"):
        load(checkpoint, ToyDiT())
    assert verify(checkpoint) == [words]


@pytest.mark.parametrize(
    ("part", "value"), [("model", float("nan")), ("ema", float("-inf")), ("optimizer", float("nan"))]
)
def test_what_is_not_finite_is_not_saved(folder: Path, part: str, value: float) -> None:
    manager = CheckpointManager(folder)
    state = state_of(6)
    assert state.ema is not None and state.optimizer is not None
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    tensors: dict[str, Any] = {
        "model": state.model.enter.weight,
        "ema": state.ema.state_dict()["enter.weight"],
        "optimizer": state.optimizer.state[state.model.enter.weight]["exp_avg_sq"],
    }
    with torch.no_grad():
        tensors[part].view(-1)[3] = value
    with pytest.raises(
        UserError, match=rf"step 6 was not written: `{part}\..*enter.weight.*` holds values that are not finite"
    ):
        manager.save(6, state, blocking=True)
    assert steps_in(folder) == [2, 4] and latest(folder) == folder / step_name(4)
    assert best(folder) == folder / step_name(2) and not list(folder.glob(".tmp-*"))


def test_set_aside_keeps_the_last_one(folder: Path) -> None:
    manager = CheckpointManager(folder)
    assert manager.set_aside(step_name(4)) == (f"{step_name(4)}.damaged", step_name(2))
    assert manager.set_aside(step_name(2)) is None
    manager.save(4, state_of(4), blocking=True)
    assert manager.set_aside(step_name(4)) == (f"{step_name(4)}.damaged-2", step_name(2))
    assert [entry["step"] for entry in recorded(folder)] == [2]
    assert [entry.name for entry in entries(folder)][1:] == [f"{step_name(4)}.damaged", f"{step_name(4)}.damaged-2"]


def test_prune_keeps_the_newest_and_the_best(folder: Path) -> None:
    manager = CheckpointManager(folder, keep_last=9)
    for step in (6, 8):
        manager.save(step, state_of(step), blocking=True)
    (folder / f"{step_name(6)}.damaged").mkdir()
    paths = prunable(folder, 1)
    assert [path.name for path in paths] == [step_name(4), step_name(6), f"{step_name(6)}.damaged"]
    remove(paths)
    assert steps_in(folder) == [2, 8] and not list(folder.glob("*.damaged"))


HOUR = 3600.0


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(2, True), {20, 50, 60}),
        (Retention(1, False, every=20), {20, 40, 60}),
        (Retention(1, False, hours=2.0), {10, 20, 40, 60}),
    ],
)
def test_milestones_are_kept(rule: Retention, kept: set[int]) -> None:
    steps = [10, 20, 30, 40, 50, 60]
    listed = [{"step": step, "loss": 0.1 if step == 20 else 0.5} for step in steps]
    times = {step: (step // 10) * HOUR + 60 for step in steps}  # 1 h 1 min, 2 h 1 min ...
    assert rule.kept(listed, times) == kept
