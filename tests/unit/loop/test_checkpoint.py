"""Checkpoints on one process: round trips, kept and refused checkpoints, and the state after a kill or with a full disk."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.config.schema import TrainConfig
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, best, load, load_weights, step_name
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from tests.support.disk_log import DiskLog
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, split

KEYS = [f"s{i}" for i in range(7)]
SHARDS = [f"shard-00001-model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
FILES = ["index.json", "meta.json", "seal.json", *SHARDS]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def fresh(seed: int = 0, **model: Any) -> TrainingState:
    toy = ToyDiT(seed=seed, **model)
    return TrainingState(toy, make_optimizer(toy, TrainConfig(lr=1e-2, weight_decay=0.1)), EMA(toy, 0.9))


def train(state: TrainingState, steps: range) -> list[float]:
    losses = []
    for epoch in steps:
        result = train_step(
            state.model, split(KEYS, 8, 0, 1, 4, epoch), flow_loss, state.optimizer,  # type: ignore[arg-type]
            global_samples=7, clip_norm=1.0, strategy="none",
        )  # fmt: skip
        state.ema.update(state.model)  # type: ignore[union-attr]
        losses.append(result.loss)
    return losses


def snapshot(state: TrainingState) -> dict[str, torch.Tensor]:
    assert state.optimizer is not None and state.ema is not None
    moments = {
        f"{name}.{key}": value
        for name, p in state.model.named_parameters()
        for key, value in state.optimizer.state[p].items()
    }
    parts = {"model": state.model.state_dict(), "ema": state.ema.state_dict(), "optimizer": moments}
    return {f"{part}.{n}": t.detach().clone() for part, tensors in parts.items() for n, t in tensors.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 2."""
    state = fresh()
    train(state, range(2))
    manager = CheckpointManager(tmp_path)
    manager.save(2, state, blocking=True)
    return tmp_path / step_name(2)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    state = fresh()
    state.meta = {"epoch": 3, "position": 128}
    train(state, range(3))
    manager = CheckpointManager(tmp_path)
    at_save = snapshot(state)
    manager.save(3, state)
    losses = train(state, range(3, 6))  # goes on while the write is under way: what is saved was copied
    assert manager.wait() == 3 and manager.wait() is None and manager.poll() is None

    other = fresh(seed=1)
    train(other, range(1))  # a used optimizer is overwritten too
    assert other.optimizer is not None and other.ema is not None
    latest = manager.latest()
    assert latest == tmp_path / "step-00000003"
    assert manager.load(latest, other.model, other.optimizer, other.ema) == {"epoch": 3, "position": 128, "step": 3}
    assert same(snapshot(other), at_save) and other.ema.updates == 3
    assert {float(s["step"]) for s in other.optimizer.state.values()} == {3.0}
    assert train(other, range(3, 6)) == losses
    assert same(snapshot(other), snapshot(state))


def test_a_checkpoint_before_the_first_step_leaves_the_optimizer_new(tmp_path: Path) -> None:
    state, other = fresh(), fresh(seed=1)
    CheckpointManager(tmp_path).save(0, state, blocking=True)
    assert not state.optimizer.state  # type: ignore[union-attr]
    load(tmp_path / step_name(0), other.model, other.optimizer, other.ema)
    assert not other.optimizer.state and same(snapshot(other), snapshot(state))  # type: ignore[union-attr]
    assert train(other, range(2)) == train(state, range(2))


def test_weights_alone(saved: Path) -> None:
    whole = fresh(seed=1)
    load(saved, whole.model, whole.optimizer, whole.ema)
    parts = snapshot(whole)
    for which, dtype in (("ema", torch.float32), ("model", torch.float32), ("ema", torch.bfloat16)):
        model = ToyDiT(seed=2).to(dtype)
        with torch.no_grad():
            model.shift.zero_()  # type: ignore[operator, union-attr]
        assert load_weights(saved, model, which)["step"] == 2  # type: ignore[arg-type]
        assert all(torch.equal(p, parts[f"{which}.{n}"].to(dtype)) for n, p in model.named_parameters())
        assert model.shift == 0.25  # buffers have no average; they are the model's
    assert not torch.equal(parts["ema.leave.weight"], parts["model.leave.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / SHARDS[0]).unlink(), "is missing"),
        (lambda folder: os.truncate(folder / SHARDS[1], 100), "has 100 of its"),
        (lambda folder: (folder / "index.json").unlink(), "no index.json"),
    ],
)
def test_incomplete_checkpoints_are_refused(saved: Path, spoil: Any, message: str) -> None:
    spoil(saved)
    with pytest.raises(UserError, match=message):
        load(saved, ToyDiT())


def test_other_models_are_refused_by_tensor(saved: Path) -> None:
    with pytest.raises(UserError, match=r"`model.enter.weight` is \(10, 3\) in the checkpoint, \(12, 3\) here"):
        load(saved, ToyDiT(width=12))
    with pytest.raises(UserError, match=r"no tensor `model.blocks.3"):
        load(saved, ToyDiT(depth=4))
    with pytest.raises(UserError, match=r"holds `model.blocks.2"):
        load(saved, ToyDiT(depth=2))
    with pytest.raises(UserError, match=r"holds `(ema|model).blocks.2"):
        load_weights(saved, ToyDiT(depth=2))
    with pytest.raises(UserError, match="there is no checkpoint"):
        load(saved.parent / "step-00000009", ToyDiT())
    plain = TrainingState(ToyDiT())
    manager = CheckpointManager(saved.parent)
    manager.save(5, plain, blocking=True)
    for call in (lambda: load(saved.parent / step_name(5), plain.model, ema=EMA(plain.model, 0.9)),
                 lambda: load_weights(saved.parent / step_name(5), ToyDiT())):  # fmt: skip
        with pytest.raises(UserError, match="has no EMA"):
            call()


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    state = TrainingState(ToyDiT())
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.7), (4, 0.8)):
        manager.mark_best(step, loss)
        manager.save(step, state, blocking=True)
    assert steps_in(tmp_path) == ["latest.json", *map(step_name, (2, 3, 4))]
    assert best(tmp_path) == tmp_path / step_name(2) and manager.latest() == tmp_path / step_name(4)
    manager.mark_best(4, 0.1)  # the loss may come after the checkpoint
    assert steps_in(tmp_path) == ["latest.json", *map(step_name, (3, 4))]

    again = CheckpointManager(tmp_path, keep_last=1)  # back to step 3, and on from there
    third = tmp_path / step_name(3)
    again.load(third, state.model)
    again.mark_best(5, 0.05)
    again.save(5, state, blocking=True)
    assert best(tmp_path) == again.latest() == tmp_path / step_name(5)
    assert steps_in(tmp_path) == ["latest.json", *map(step_name, (3, 5))]  # 3 is in use
    again.save(3, state, blocking=True)  # written again over the old one; it is the newest now, though not the highest
    assert again.latest() == third and steps_in(third)[:2] == FILES[:2]


def test_an_unrecorded_checkpoint_is_found_and_leftovers_go(saved: Path) -> None:
    folder = saved.parent
    (folder / "latest.json").unlink()
    (folder / ".tmp-step-00000007").mkdir()
    (folder / ".tmp-step-00000007" / FILES[2]).write_bytes(b"cut")
    saved.rename(folder / ".old-step-00000002")  # killed between the two renames
    manager = CheckpointManager(folder)
    assert manager.latest() == saved and steps_in(folder) == ["step-00000002"]
    assert CheckpointManager(folder / "new").latest() is None


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")
def test_files_and_names_are_synced_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    train(state, range(1))
    log = DiskLog(monkeypatch)
    CheckpointManager(tmp_path).save(1, state, blocking=True)
    (named,) = [place for place, event in enumerate(log.events) if event == ("name", tmp_path / step_name(1))]
    before = log.events[:named]
    folders = [path for what, path in before if what == "sync" and path.parent == tmp_path]
    assert len(folders) == 1 and before[-1] == ("sync", folders[0])  # the names in it, last of all
    assert sum(what == "sync" and path.parent == folders[0] for what, path in before) == len(FILES)
    assert log.place("sync", tmp_path) > named
    assert log.place("name", tmp_path / "latest.json") > named


def test_a_full_disk_is_an_error_and_spares_what_is_there(saved: Path) -> None:
    state = fresh()
    train(state, range(2))
    manager = CheckpointManager(saved.parent)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # writes beyond fail as on a full disk
    try:
        manager.save(3, state)  # the failure is the background's; it surfaces at the next call
        with pytest.raises(
            UserError, match=r"checkpoint of step 3 could not be written.*earlier checkpoints are untouched"
        ):
            manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_in(saved.parent) == ["latest.json", "step-00000002"]
    load(saved, ToyDiT())
    manager.save(3, state, blocking=True)
    assert manager.latest() == saved.parent / step_name(3)


def _die_while_writing(folder: str) -> None:
    state = TrainingState(ToyDiT())
    manager = CheckpointManager(Path(folder))
    manager.save(1, state, blocking=True)
    temporary = Path(folder) / f".tmp-{step_name(2)}"
    temporary.mkdir()
    os.mkfifo(temporary / "shard-00001-model-00001-of-00001.safetensors")  # the writer waits here for a reader
    manager.save(2, state)  # and yet save returns
    assert manager.poll() is None
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_writing_leaves_the_old_one_whole(tmp_path: Path) -> None:
    process = mp.get_context("spawn").Process(target=_die_while_writing, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / ".tmp-step-00000002").is_dir()
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == tmp_path / step_name(1) and not list(tmp_path.glob(".tmp-*"))
    model: nn.Module = ToyDiT(seed=1)
    load(tmp_path / step_name(1), model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ToyDiT().parameters(), strict=True))
