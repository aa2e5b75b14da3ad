"""The self-check of a task that is no video: what only this process has registered, right and wrong by one part in a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.functional import linear

from mmspeed.__main__ import main
from mmspeed.config.tasks import TASKS, TaskEntry
from tests.support.characters import CharacterDomain, CharacterModel


class FaultyLinear(nn.Linear):
    """Computes as it should; the gradient of its weight is 1.01 times what it should be."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight + 0.01 * (self.weight - self.weight.detach()), self.bias)


class FaultyTask(CharacterDomain):
    """The character task with a mistake in one layer's backward where there are several processes."""

    def build(self) -> dict[str, nn.Module]:
        model = super().build()["model"]
        assert isinstance(model, CharacterModel)
        if dist.is_initialized() and dist.get_world_size() > 1:
            up = model.blocks[1].up
            model.blocks[1].up = FaultyLinear(up.in_features, up.out_features, device="meta")
        return {"model": model}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a character model that is known to this process alone."""
    entry = TaskEntry(
        "tests.support.characters:CharacterDomain", "tests.support.characters:CharacterConfig", origin="a test"
    )
    monkeypatch.setitem(TASKS, "characters", entry)
    path = tmp_path / "run.yaml"
    tree = {"task": "characters", "output": str(tmp_path / "runs"), "device": {"kind": "cpu"}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_gradient_that_is_one_percent_too_large_fails(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "tests.ranks.test_selfcheck_tasks:FaultyTask", "tests.support.characters:CharacterConfig"
    monkeypatch.setitem(TASKS, "characters", TaskEntry(*names, origin="a test"))
    assert main(["check", str(path), "--parallel", "dp_shard=2"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "step: 1 of 36 gradients differ" in text
    assert "only gradients of blocks.*.up differ; the losses are equal" in text
    assert "the mistake is in backward, at blocks.1.up" in text


@pytest.mark.slow
def test_bfloat16_is_compared_with_float32(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check",
        str(path),
        "device.dtype=bfloat16",
        "memory.activation_policy={block: recompute}",
        "--parallel",
        "dp_shard=2",
    ]
    assert main(words) == 0
    assert "the error of bfloat16 in one process" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path), "--parallel", "ulisses=2"]) == 1
    assert "did you mean 'parallel.ulysses'" in capsys.readouterr().err
