"""Resuming where the newest checkpoint is damaged: from the newest sound one, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.manager import DamagedCheckpointError, step_name, steps_in
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.training.events import StepEvent
from tests.support.character_runs import character_config, losses
from tests.support.characters import CharacterConfig, CharacterDomain
from tests.support.checkpoints import differing, whole_checkpoint

STEPS = ("checkpoint.every=2", "checkpoint.keep_last=3", "checkpoint.keep_best=true")


def train(folder: Path, steps: int, *overrides: str) -> CharacterConfig:
    config = character_config(folder, *STEPS, f"train.steps={steps}", *overrides)
    TrainPipeline(config, task=CharacterDomain(config)).run()
    return config


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3, 4 and 6, and another of 8 steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, 6)
    train(folder, 8, "name=whole")
    return folder


def spoil_tensor(checkpoint: Path) -> None:
    path = next(path for path in sorted(checkpoint.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def truncate(checkpoint: Path) -> None:
    path = next(path for path in sorted(checkpoint.glob("*.safetensors")))
    path.write_bytes(path.read_bytes()[:100])


@pytest.fixture
def home(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "home"))


@pytest.mark.parametrize("spoil", [spoil_tensor, truncate])
def test_the_run_goes_on_from_the_newest_sound_one(home: Path, spoil: object, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = character_config(home, *STEPS).run_dir / "checkpoints"
    spoil(checkpoints / step_name(6))  # type: ignore[operator]
    if spoil is truncate:
        spoil_tensor(checkpoints / step_name(4))
    lines: list[str] = []
    monkeypatch.setattr("mmspeed.pipelines.training.saved_state.log.warning", lines.append)
    config = train(home, 8)
    sound = 3 if spoil is truncate else 4
    warnings = [line for line in lines if "is kept as" in line]
    assert len(warnings) == (2 if spoil is truncate else 1)
    assert f"{step_name(6)}.damaged" in warnings[0] and f"goes on from {step_name(sound)}" in warnings[-1]
    assert (checkpoints / f"{step_name(6)}.damaged").is_dir() and step_name(8) in {
        path.name for path in checkpoints.iterdir()
    }
    whole = character_config(home, *STEPS, "name=whole")
    assert losses(config) == losses(whole)
    assert not differing(whole_checkpoint(config.run_dir), whole_checkpoint(whole.run_dir))


BAD_LOSSES = [b'{"kind": "train", "step": 1}', b'{"kind": "validation", "step": 1, "loss": "x"}']


@pytest.mark.parametrize("record", [b"{}", b"[]", b"null", b"3", b"\xff", b"[" * 200_000])
def test_odd_records_beside_a_checkpoint_change_nothing(
    home: Path, record: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what run.json says, which is written anew; lines that no run writes are kept beside the rows."""
    config, odd = (
        character_config(home, *STEPS),
        [b"3", b"null", b'{"step": "4"}', b'{"kind": "train"}', b"\xff", record, *BAD_LOSSES],
    )
    place, lines = config.run_dir / "run.json", list[str]()
    sound = place.read_bytes()
    place.write_bytes(record)
    assert RunFolder(config.run_dir).info() == json.loads(sound)
    odd = [line for line in odd if line != b"{}"]  # a row of nothing
    with open(config.run_dir / "metrics.jsonl", "ab") as file:
        file.write(b"".join(line + b"\n" for line in odd) + b'{"cut off')
    monkeypatch.setattr("mmspeed.pipelines.training.saved_state.log.warning", lines.append)
    train(home, 8)
    assert losses(config) == losses(character_config(home, *STEPS, "name=whole"))
    assert place.read_bytes() == sound and (config.run_dir / "metrics.odd").read_bytes().splitlines() == odd
    assert "run.json lacked vocabulary, parameters, " in lines[0] and f"metrics.odd: {len(odd)}" in lines[1]


def test_strict_resuming_ends_with_the_line(home: Path) -> None:
    checkpoints = character_config(home, *STEPS).run_dir / "checkpoints"
    spoil_tensor(checkpoints / step_name(6))
    with pytest.raises(
        DamagedCheckpointError, match=r"step-00000006 is damaged: .*delete that folder to go on from step 4"
    ):
        train(home, 8, "train.resume=strict")
    assert steps_in(checkpoints) == [3, 4, 6]


def test_the_only_checkpoint_is_never_moved(home: Path) -> None:
    checkpoints = character_config(home, *STEPS).run_dir / "checkpoints"
    for step in (3, 4):
        shutil.rmtree(checkpoints / step_name(step))
    spoil_tensor(checkpoints / step_name(6))
    with pytest.raises(UserError, match="delete that folder to start again"):
        train(home, 8)
    assert steps_in(checkpoints) == [6]


def test_commands_list_verify_and_prune(home: Path) -> None:
    run = character_config(home, *STEPS).run_dir
    command = CliRunner()
    shown = command.invoke(app, ["checkpoint", "list", str(run)])
    assert shown.exit_code == 0 and "latest" in shown.stdout.splitlines()[-1]
    assert command.invoke(app, ["checkpoint", "verify", str(run)]).stdout.count(": sound") == 3
    spoil_tensor(run / "checkpoints" / step_name(4))
    verified = command.invoke(app, ["checkpoint", "verify", str(run)])
    assert verified.exit_code == 1 and "are not those that were written" in verified.stdout
    assert command.invoke(app, ["checkpoint", "verify", str(run), "--step", "6"]).exit_code == 0
    assert "would remove" in command.invoke(app, ["checkpoint", "prune", str(run)]).stdout
    assert steps_in(run / "checkpoints") == [3, 4, 6]
    command.invoke(app, ["checkpoint", "prune", str(run), "--yes"])
    assert steps_in(run / "checkpoints") == [6]
    with pytest.raises(UserError, match="holds no checkpoint"):
        command.invoke(app, ["checkpoint", "list", str(home)], catch_exceptions=False)


def test_a_run_goes_on_from_the_copy_on_the_local_disk_bit_for_bit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = ("name=local", f"checkpoint.local={home / 'disk'}", "checkpoint.keep_local=2")
    config = character_config(home, *STEPS, *local, "train.steps=100")
    config.run_dir.mkdir(parents=True)
    stop_after = _StopAfter(config.run_dir, 5)
    TrainPipeline(config, task=CharacterDomain(config), callbacks=[stop_after]).run()
    checkpoints = config.run_dir / "checkpoints"
    assert len(list((home / "disk").glob("*/*/step-*"))) == 2
    for step in (4, 5):
        shutil.rmtree(checkpoints / step_name(step))  # as after a kill while the shared ones were being written
    lines: list[str] = []
    monkeypatch.setattr("mmspeed.pipelines.training.saved_state.log.info", lines.append)
    train(home, 8, *local)
    assert "going on from the copies of step 5 on the local disks" in lines
    whole = character_config(home, *STEPS, "name=whole")
    assert losses(config) == losses(whole)
    assert not differing(whole_checkpoint(config.run_dir), whole_checkpoint(whole.run_dir))
    assert not list((home / "disk").glob("*/*/step-*"))  # the run is finished


class _StopAfter(TrainCallback):
    """A user's callback that asks for the end of a run."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step(self, event: StepEvent) -> None:
        if event.step == self.step:
            (self.folder / "stop").touch()
