"""Repositories of diffusers: what is read of them, and one line for each that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from tests.support.tiny_repositories import save_wan

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("repositories") / "wan")


@pytest.fixture
def copy(wan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(wan, tmp_path / "wan")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_repository_says_what_its_files_say(wan: Path) -> None:
    repository = Repository.open(str(wan))
    assert repository.folder == wan and repository.transformer == "transformer"
    assert repository.class_name == "WanTransformer3DModel" and repository.pipeline == "WanPipeline"
    assert repository.index["expand_timesteps"] is False
    assert repository.components["vae"] == ("diffusers", "AutoencoderKLWan")
    assert "transformer_2" not in repository.components  # empty in the index
    assert repository.config("scheduler")["flow_shift"] == 3.0
    assert repository.config("transformer")["in_channels"] == 16
    assert repository.config("tokenizer")["tokenizer_class"].startswith("T5")
    assert repository.has("vae") and not repository.has("image_encoder")
    assert [path.name for path in repository.weight_files()] == ["diffusion_pytorch_model.safetensors"]


def test_the_fingerprint_follows_the_transformer_alone(copy: Path) -> None:
    first = Repository.open(str(copy)).fingerprint
    edit(copy / "transformer" / "config.json", _diffusers_version="0.0.1")
    edit(copy / "scheduler" / "scheduler_config.json", flow_shift=5.0)
    assert Repository.open(str(copy)).fingerprint == first
    tensors = load_file(copy / WEIGHTS)
    tensors["proj_out.bias"] += 1
    save_file(tensors, copy / WEIGHTS)
    assert Repository.open(str(copy)).fingerprint != first


def test_another_transformer_of_the_repository(copy: Path) -> None:
    with pytest.raises(UserError, match=r"has no folder 'transformer_2' .*folders there: scheduler, text_encoder"):
        Repository.open(str(copy)).of("transformer_2")
    shutil.copytree(copy / "transformer", copy / "transformer_2")
    second = Repository.open(str(copy)).of("transformer_2")
    assert second.class_name == "WanTransformer3DModel"
    assert [path.parent.name for path in second.weight_files()] == ["transformer_2"]


def missing_transformer(copy: Path) -> None:
    (copy / "transformer").rename(copy / "unet")


def pickles(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "transformer" / "diffusion_pytorch_model.bin")


def only_gguf(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "transformer" / "wan-Q8_0.gguf")


def fp8(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, copy / WEIGHTS)


def quantised(copy: Path) -> None:
    edit(copy / "transformer" / "config.json", quantization_config={"quant_method": "bitsandbytes"})


def a_shard_is_missing(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    index = {"weight_map": {"proj_out.bias": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    (copy / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_transformer, r"has no folder 'transformer' with a config\.json \(folders there: scheduler, .*unet, vae\)"),
        (pickles, r"holds no diffusion_pytorch_model\.safetensors, only pickles such as diffusion_pytorch_model\.bin"),
        (only_gguf, r"only the GGUF file wan-Q8_0\.gguf"),
        (fp8, r"is an fp8 file \(`proj_out\.weight` is F8_E4M3\)"),
        (quantised, r"is quantised \(quant_method bitsandbytes\)"),
        (a_shard_is_missing, r"names diffusion_pytorch_model-00001-of-00002\.safetensors, which .* lacks"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=rf"^model\.pretrained: .*{message}") as caught:
        repository = Repository.open(str(copy))
        assert repository.class_name
        repository.weight_files()
    assert "\n" not in str(caught.value)


def test_places_that_are_no_repository(wan: Path, tmp_path: Path) -> None:
    for place, message in (
        (wan / "transformer", "is the folder of one model: name the repository around it"),
        (tmp_path / "nothing", "no folder"),
        (tmp_path / "wan.gguf", "is a GGUF file"),
    ):
        with pytest.raises(UserError, match=message):
            Repository.open(str(place))


@pytest.mark.slow
def test_a_hub_id_needs_small_files_until_weights_are_read(wan: Path, tmp_path: Path) -> None:
    """The hub cannot be reached, and its cache holds the JSON files of one repository alone.

    Run in a new process, because the hub's address is read at import.
    """
    cache = tmp_path / "models--nobody--wan"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    for path in wan.rglob("*.json"):
        if "tokenizer" not in path.parts:
            target = cache / "snapshots" / "abc" / path.relative_to(wan)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    script = (
        "from mmspeed.config.schema import PublishedModelConfig\n"
        "from mmspeed.errors import UserError\n"
        "from mmspeed.models.sections import with_weights\n"
        "from mmspeed.protocols import source_of\n"
        "for name in ('nobody/wan', 'nobody/nothing'):\n"
        "    try:\n"
        "        model = with_weights(PublishedModelConfig(kind='diffusers', pretrained=name), 16, 16, 'meta')\n"
        "        print(type(model).__name__)\n"
        "        source_of(model).fingerprint\n"
        "    except UserError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    kind, without_weights, unreachable = run.stdout.splitlines()
    assert kind == "WanTransformer3DModel"
    words = "holds no diffusion_pytorch_model.safetensors (the hub cannot be reached, or nobody/wan has no such file"
    assert without_weights.startswith("model.pretrained: ") and words in without_weights
    assert unreachable.startswith("model.pretrained: nobody/nothing is no folder here")
    assert "cannot be reached" in unreachable
