"""A run of adapters goes on with a base in another place, and with nothing else beside other adapters or another base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from tests.support.runs import losses
from tests.unit.pipelines.test_adapter_memory import adapted, save_base

SHORT = ("train.steps=2", "validate.samples=0")
FILE = Path("base", "transformer", "diffusion_pytorch_model.safetensors")
REFUSED = [
    (("model.adapter.rank=5",), r"run was started with another model\.adapter\.rank: restore the config"),
    (("model.adapter.alpha=4",), r"another model\.adapter\.alpha:"),
    (("model.adapter.rslora=true",), r"another model\.adapter\.rslora:"),
    (("model.adapter.targets=attention",), r"another model\.adapter\.targets:"),
    (("model.adapter=null",), r"another model\.adapter:"),
    (("model.subfolder=copy",), r"another model\.subfolder:"),
    (("device.dtype=bfloat16", "model.base.dtype=bfloat16"), r"trained on another base: .* in the same number type"),
    (("device.dtype=bfloat16", "model.base.dtype=int8"), r"trained on another base: .* in the same number type"),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a run of one step."""
    folder = tmp_path_factory.mktemp("resumed")
    save_base(folder)
    shutil.copytree(folder / "base" / "transformer", folder / "base" / "copy")
    TrainPipeline(adapted(folder, "run", "train.steps=1", "validate.samples=0")).run()
    return folder


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda each: each[-1] if isinstance(each, tuple) else "")
def test_what_the_adapters_were_trained_with_stays(home: Path, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainPipeline(adapted(home, "run", *SHORT, *keys)).run()


def test_files_of_the_base_that_have_changed_are_refused(home: Path) -> None:
    before, tensors = (home / FILE).read_bytes(), load_file(home / FILE)
    save_file({**tensors, "proj_out.bias": tensors["proj_out.bias"] + 1}, home / FILE)
    with pytest.raises(UserError, match=r"was started from another base: the weights of the role model"):
        TrainPipeline(adapted(home, "run", *SHORT)).run()
    (home / FILE).write_bytes(before)


def test_the_place_of_the_base_may_be_another(home: Path) -> None:
    config = adapted(home, "run", *SHORT, "model.base.place=host")
    TrainPipeline(config).run()
    assert len(losses(config)) == 2
