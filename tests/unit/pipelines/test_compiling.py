"""What `train.compile: auto` chooses, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from mmspeed.device import Device
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.pipelines.run import compiling as module
from mmspeed.pipelines.run.compiling import compiling
from tests.support.memory_ways import make_model
from tests.support.runs import small_config

HERE, THERE = Device("cpu", 0), Device("cuda", 0)
DENSE = SoraDiT(SoraDiTConfig(width=24, depth=1, heads=2, latent_channels=2, text_width=6, adaln_rank=2))
CASES = [
    ("one process", (), DENSE, "nothing in `memory` or in the model is against it"),
    ("block", ("memory.activation_policy.block=recompute",), DENSE, "is against it"),
    ("policies", ("memory.activation_policy.mlp=recompute",), DENSE, "`block: recompute` is the only policy"),
    ("budget", ("memory.fraction=0.9",), DENSE, "not compiled (train.compile: auto): a budget chooses policies"),
    ("chunks", ("memory.mlp_chunk=8",), DENSE, "not compiled (train.compile: auto): mlp_chunk"),
    ("ring", ("parallel.ring=2",), DENSE, "exchanges between processes"),
    ("sparse", (), make_model("full", True), "plans of sparse attention"),
]


@pytest.mark.parametrize(("overrides", "model", "words"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_auto_says_why(
    overrides: tuple[str, ...], model: nn.Module, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tries_graphs", lambda device: True)
    config = small_config(tmp_path, *overrides)
    chosen = compiling(config, THERE, model)
    assert chosen.line is not None and words in chosen.line
    assert chosen.on == ("is against it" in words) == ("not compiled" not in chosen.line)
    assert compiling(config, HERE, model) == (False, "") and compiling(config, HERE, model).line is None


def test_blocks_of_other_packages_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnBlock(nn.Linear):
        """A block of nobody's package."""

    monkeypatch.setattr(module, "tries_graphs", lambda device: True)
    model = nn.ModuleDict({"blocks": nn.ModuleList([OwnBlock(2, 2)])})
    assert "OwnBlock is of a package that no test compiles" in compiling(small_config(tmp_path), THERE, model).why
    assert compiling(small_config(tmp_path / "2", "train.compile=true"), HERE, model) == (True, "")
