"""Averages of checkpoints as files of the model: bit for bit those of one checkpoint, the mean of several, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load_weights, step_name
from mmspeed.loop.checkpoint.merging import merge_averages
from tests.support.toy import ToyDiT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the averages of three steps."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", keep_last=9)
    model = ToyDiT()
    ema = EMA(model, 0.5)
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step)
        ema.update(model)
        manager.save(step, TrainingState(model, ema=ema), blocking=True)
    return tmp_path / "run"


def averages(run: Path, step: int) -> dict[str, torch.Tensor]:
    model = ToyDiT(seed=5)
    load_weights(run / "checkpoints" / step_name(step), model, "ema")
    return model.state_dict()


def test_the_newest_average_is_written_bit_for_bit(run: Path) -> None:
    done = CliRunner().invoke(app, ["checkpoint", "merge-ema", str(run)])
    assert done.exit_code == 0, done.output
    file = run / "ema-00000003.safetensors"
    assert f"{file}: " in done.output and "the average of step-00000003" in done.output.replace("\n", "")
    written, expected = load_file(file), averages(run, 3)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    ToyDiT(seed=7).load_state_dict(written)  # strict


def test_averages_of_several_steps_are_merged_to_their_mean(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mean.safetensors"
    words = ["checkpoint", "merge-ema", str(run), "--step", "3", "--step", "1", "--output", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    first, last, merged = averages(run, 1), averages(run, 3), load_file(file)
    for name, _ in ToyDiT().named_parameters():
        torch.testing.assert_close(merged[name], (first[name] + last[name]) / 2)
        assert not torch.equal(merged[name], last[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean.safetensors", "run"]


def test_no_file_comes_of_a_damaged_checkpoint_or_one_without_averages(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "ema.safetensors"
    with pytest.raises(UserError, match="there is no checkpoint"):
        merge_averages([run / "checkpoints" / step_name(9)], target)
    shard = next((run / "checkpoints" / step_name(2)).glob("shard-00001-model-00002-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="are not those that were written"):
        merge_averages([run / "checkpoints" / step_name(2)], target)
    CheckpointManager(tmp_path / "plain").save(1, TrainingState(ToyDiT()), blocking=True)
    with pytest.raises(UserError, match="has no moving average"):
        merge_averages([tmp_path / "plain" / step_name(1)], target)
    assert not target.exists()
