"""Layouts of experts that do not fit, through every command that takes one: one line with the key and what would fit, before any work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mmspeed.__main__ import main
from tests.support.runs import small_tree

DDP = r"'parallel': e(tp|p) goes with strategy fsdp or auto, which shard the experts, not with ddp"
THREE = r"ep 3 does not divide the 8 experts of the model: use one of 1, 2, 4, 8"
WIDTH = r"etp 3 does not divide the 32 hidden units of an expert of the model: use one of 1, 2, 4, 8, 16, 32"
COPY = r"ep 3 does not divide the 2 devices that share one copy of the parameters: use one of 1, 2, or raise dp_shard"
SHARED = r"ep 2 leaves 3 processes with the same experts, which divide no dim of their part \(6, 64, 64\) of \S*gate_up_proj: use ep 3 or 6, or"
# command, and what its only line says; LM has 8 experts of 32 hidden units, DENSE has none
WRONG = [
    (("train", "LM", "--nproc", "2", "parallel.ep=3"), COPY),
    (("train", "LM", "--nproc", "4", "parallel.dp_replicate=2", "parallel.ep=4"), r"ep 4 does not divide the 2 devices"),
    (("train", "LM", "--nproc", "2", "parallel.ep=16"), r"ep 16 does not divide the 2 devices.*use one of 1, 2"),
    (("train", "LM", "--nproc", "4", "parallel.ep=2", "parallel.etp=4"), r"ep 2 x etp 4 does not divide the 4 devices"),
    (("train", "LM", "parallel.ep=2"), r"ep 2 does not divide the 1 devices .*more processes: --nproc"),
    (("train", "LM", "--nproc", "2", "parallel.ep=0"), r"'parallel.ep': input should be greater than or equal to 1"),
    (("train", "LM", "--nproc", "2", "parallel.ep=2", "parallel.strategy=ddp"), DDP),
    (("train", "LM", "--nproc", "2", "parallel.etp=2", "parallel.strategy=ddp"), DDP),
    (("train", "LM", "--nproc", "4", "parallel.ep=4", "parallel.ep_inner=3"), r"ep_inner 3 must divide ep 4"),
    (("check", "LM", "--ranks", "3", "parallel.ep=2"), r"ep 2 does not divide the 3 devices"),
    (("check", "LM", "--ranks", "3", "parallel.ep=3"), THREE),
    (("check", "LM", "--ranks", "3", "parallel.etp=3"), WIDTH),
    (("check", "LM", "--ranks", "6", "parallel.ep=2", "model.num_experts=12"), SHARED),
    (("check", "DENSE", "--ranks", "2", "parallel.ep=2"), r"ep 2: the model has no experts; leave ep out"),
    (("check", "LM", "--parallel", "ep=3"), THREE),
    (("check", "LM", "--parallel", "ep=16"), r"ep 16 does not divide the 8 experts"),
    (("check", "LM", "--parallel", "etp=3"), WIDTH),
    (("check", "LM", "--parallel", "ep=2,dp_shard=3"), r"ep 2 does not divide the 3 devices"),
    (("check", "LM", "--parallel", "ep=2,dp_shard=6"), r"ep 2 leaves 3 processes .* use 3 times the dp_replicate"),
    (("check", "LM", "--parallel", "ep=2,strategy=ddp"), DDP),
    (("check", "LM", "--parallel", "ep=x"), r"'parallel.ep': input should be a valid integer.*got 'x'"),
    (("check", "LM", "--parallel", "ep=2,ep_iner=2"), r"unknown key 'parallel\.ep_iner'; did you mean 'parallel\.ep_inner'"),
    (("check", "DENSE", "--parallel", "ep=2"), r"ep 2: the model has no experts; leave ep out"),
    (("check", "VIDEO", "--parallel", "ep=2"), r"ep 2: the plan of SoraDiT has no experts; leave ep out"),
    (("demo", "--task", "language", "--short", "--parallel", "ep=3"), THREE),
    (("demo", "--task", "language", "--short", "--parallel", "etp=3"), r"etp 3 does not divide the 128 hidden units"),
    (("demo", "--task", "language", "--short", "--parallel", "ep=2,dp_shard=3"), r"ep 2 does not divide the 3 devices"),
    (("demo", "--task", "language", "--short", "--parallel", "ep=2,strategy=ddp"), DDP),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the configs that the table names."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "a.txt").write_text("the rabbit runs over a meadow\n\n" * 100)
    trees = {"VIDEO": small_tree(folder)}
    for name, shape in (("LM", "tiny-qwen3-30b-a3b"), ("DENSE", "tiny-qwen3-8b")):
        texts = {"sources": [{"path": str(folder / "a.txt")}], "cache": str(folder / "cache")}
        trees[name] = {"task": "language", "output": str(folder / "runs"), "texts": texts, "model": {"shape": shape}}
    for name, tree in trees.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**tree, "device": {"kind": "cpu"}}), encoding="utf-8")
    return {name: str(folder / f"{name}.yaml") for name in trees}


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_layout_of_experts_that_does_not_fit_is_one_line(
    words: tuple[str, ...], said: str, places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "demo")] if words[0] == "demo" else []
    assert main([places.get(word, word) for word in words] + output) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "mmspeed: " in line]
    assert len(lines) == 1 and lines[0].startswith("mmspeed: error: "), lines
    assert re.search(said, lines[0]), lines[0]
    assert not (tmp_path / "demo").exists()
