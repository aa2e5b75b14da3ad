"""Models of diffusers without memory, filled from the files of their repository."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspeed.config.schema import PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.sections import with_weights
from mmspeed.protocols import source_of
from tests.support.tiny_repositories import save_wan, wan_transformer
from tests.support.video_transformers import make_inputs, make_model

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("repositories") / "wan")


@pytest.fixture
def copy(wan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(wan, tmp_path / "wan")


def built(folder: Path) -> nn.Module:
    return with_weights(PublishedModelConfig(kind="diffusers", pretrained=str(folder)), 16, 16, "meta")


def filled(folder: Path) -> nn.Module:
    model = built(folder)
    source = source_of(model)
    assert source is not None
    materialize(model, torch.device("cpu"))
    read_weights(model, source)
    return model


def inputs() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 16, 3, 4, 6, generator=g),
        "timestep": torch.rand(2, generator=g) * 1000,
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=g),
        "return_dict": False,
    }


def test_a_filled_model_is_the_one_that_diffusers_loads(wan: Path) -> None:
    """Also its tables of positions, which are in no file."""
    model = built(wan)
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers()) and list(model.buffers())
    model = filled(wan)
    saved = wan_transformer().train()
    assert model.training and model.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in [*saved.named_parameters(), *saved.named_buffers()]:
        assert torch.equal(dict([*model.named_parameters(), *model.named_buffers()])[name], tensor), name
    assert torch.equal(model(**inputs())[0], saved(**inputs())[0])


def test_a_base_in_half_precision_trains_in_float32(copy: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(copy / WEIGHTS).items()}
    save_file(tensors, copy / WEIGHTS)
    for name, parameter in filled(copy).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name].float()), name


def edited(copy: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(copy / WEIGHTS)
    change(tensors)
    save_file(tensors, copy / WEIGHTS)


def missing(copy: Path) -> None:
    edited(copy, lambda tensors: [tensors.pop(name) for name in ("proj_out.bias", "proj_out.weight")] and None)


def surplus(copy: Path) -> None:
    edited(copy, lambda tensors: tensors.update({"other.weight": torch.ones(2)}))


def misshaped(copy: Path) -> None:
    path = copy / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ffn_dim": 64}))


def integers(copy: Path) -> None:
    edited(copy, lambda tensors: tensors.update({"proj_out.bias": tensors["proj_out.bias"].to(torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"lacks `proj_out\.weight`, `proj_out\.bias` \(2 missing, 0 surplus, 0 of another shape\)"),
        (surplus, r"holds `other\.weight`, which the model does not have \(0 missing, 1 surplus"),
        (
            misshaped,
            r"holds `blocks\.0\.ffn\.net\.0\.proj\.weight`, .* and 1 more in another shape: \(32, 24\) there, \(64, 24\) by its config",
        ),
        (integers, r"`proj_out\.bias` in .* is I8"),
    ],
)
def test_other_tensors_are_one_line(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=rf"^model\.pretrained: .*{message}") as caught:
        built(copy)
    assert "\n" not in str(caught.value)


# names of Wan's authors, for names of diffusers, in the order in which they are replaced
ORIGINAL = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn2": "cross_attn",
    "attn1": "self_attn",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    "proj_out": "head.head",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    ".norm2.": ".norm3.",
}


def original_name(name: str) -> str:
    for ours, theirs in ORIGINAL.items():
        name = name.replace(ours, theirs)
    return "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")


def file_model(folder: Path, file: Path) -> nn.Module:
    section = PublishedModelConfig(kind="diffusers", pretrained=str(folder), weights=str(file))
    model = with_weights(section, 16, 16, "meta")
    source = source_of(model)
    assert source is not None
    materialize(model, torch.device("cpu"))
    read_weights(model, source)
    return model


@pytest.mark.parametrize("rename", [lambda name: f"model.diffusion_model.{original_name(name)}", str])
def test_a_single_file_in_its_authors_names_or_diffusers_own(
    wan: Path, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    """Its weights are those that `from_single_file` of the class reads."""
    from diffusers import WanTransformer3DModel

    tensors = {rename(name): tensor + 1 for name, tensor in load_file(wan / WEIGHTS).items()}
    save_file(tensors, tmp_path / "wan.safetensors")
    truth = WanTransformer3DModel.from_single_file(
        str(tmp_path / "wan.safetensors"), config=str(wan), subfolder="transformer"
    ).state_dict()
    model = file_model(wan, tmp_path / "wan.safetensors")
    assert model.state_dict().keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in model.state_dict().items())
    section = PublishedModelConfig(kind="diffusers", pretrained=str(wan))
    own, file = (source_of(each) for each in (with_weights(section, 16, 16, "meta"), model))
    assert own is not None and file is not None and own.fingerprint != file.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wan-Q4_K_M.gguf", "is a GGUF file"),
        ("nothing.safetensors", "there is no file"),
        ("scaled.safetensors", r"is an fp8 file \(`scaled_fp8` holds scales\)"),
        ("other.safetensors", r"lacks `scale_shift_table`, .* and \d+ more"),
    ],
)
def test_files_that_hold_no_weights_of_the_model(wan: Path, tmp_path: Path, name: str, message: str) -> None:
    if name == "scaled.safetensors":
        save_file({"scaled_fp8": torch.ones(2)}, tmp_path / name)
    if name == "other.safetensors":
        save_file({"conv.weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UserError, match=message) as caught:
        file_model(wan, tmp_path / name)
    assert "\n" not in str(caught.value)


CLASSES = (
    "wan", "ltx", "cogvideox", "cogvideox, sincos", "hunyuan", "hunyuan 1.5", "mochi", "qwen, images", "flux, images",
)  # fmt: skip


@pytest.mark.parametrize("case", CLASSES)
def test_each_class_is_filled_as_diffusers_loads_it(tmp_path: Path, case: str) -> None:
    """All parameters and buffers, bitwise, and the output; tables that no file holds are made as the class makes them."""
    saved: Any = make_model(case)
    saved.save_pretrained(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text("{}")
    model, truth = filled(tmp_path), type(saved).from_pretrained(tmp_path / "transformer").train()
    assert type(model) is type(truth) and dict(model.named_buffers()).keys() == dict(truth.named_buffers()).keys()
    for name, tensor in [*truth.named_parameters(), *truth.named_buffers()]:
        other = dict([*model.named_parameters(), *model.named_buffers()])[name]
        assert torch.equal(other, tensor) and other.dtype == tensor.dtype, name
    inputs = make_inputs(case)
    with torch.no_grad():
        assert torch.equal(model(**inputs, return_dict=False)[0], truth(**inputs, return_dict=False)[0])
