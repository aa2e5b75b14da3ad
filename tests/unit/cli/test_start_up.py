"""What commands load: whatever has nothing to do, or ends with a mistake, loads no more than it needs to say so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import small_tree

HEAVY = (
    "transformers",
    "diffusers",
    "peft",
    "triton",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
)
CODE = "import sys; from mmspeed.__main__ import main; code = main(sys.argv[2:])"
LOADED = "; print('loaded', sorted(set(sys.argv[1].split(',')) & set(sys.modules)), code)"


def loaded(unwanted: tuple[str, ...], *words: str, code: str = CODE) -> tuple[str, str]:
    """The last line of a command's process: those of `unwanted` that it has loaded, and its exit code; and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code + LOADED, ",".join(unwanted), *words], capture_output=True, text=True, timeout=100
    )
    return (done.stdout.splitlines() or [""])[-1], done.stderr


def test_commands_load_no_libraries_that_they_do_not_use(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small_tree(tmp_path)))
    assert loaded(("transformers.models.bert", "diffusers"), "check", str(path))[0] == "loaded [] 0"
    assert loaded((), "preprocess", str(path))[0] == "loaded [] 0"
    assert loaded(HEAVY, "preprocess", str(path))[0] == "loaded [] 0"
    pipeline = "import sys; from mmspeed.pipelines import TrainPipeline; code = 0"
    assert loaded((*HEAVY, "torch.distributed.checkpoint"), code=pipeline)[0] == "loaded [] 0"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "nothere", "--out", "x"], "nothere: no such run"),
        (["report", "nothere"], "nothere: no such run"),
        (["sample", "run.yaml", "--prompt", "x"], "give its folder, such as runs/run"),
        (["check", "run.yaml", "model.size=huge"], "'huge' is not a known size"),
        (["preprocess", "run.yaml", "model.size=tin"], "did you mean 'tiny'?"),
        (["train", "run.yaml", "method.kind=finetun"], "did you mean 'finetune'?"),
        (["train", "run.yaml", "model={kind: diffusers, pretrained: wan2.1-1.3b}"], "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        (["check", "run.yaml", "model={kind: diffusers, pretrained: wann}"], "wann is no short name"),
        (["init", "x", "--model", "wann", "--videos", "run.yaml"], "wann is no short name"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_told_before_torch_is_loaded(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**small_tree(tmp_path), "model": {}, "vae": {}}))
    monkeypatch.chdir(tmp_path)
    line, errors = loaded(("torch", "numpy", "av", "pyarrow"), *words)
    assert line == "loaded [] 1" and says in errors
