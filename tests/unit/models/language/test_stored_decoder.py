"""Files of language models: fp8 in blocks, several shards, and files that do not fit, each an error that lists its tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.models.assemblies import Joined, Stacked, part_shapes, read_part, shape_of, taken_apart
from mmspeed.models.language.weights import HubWeights, dequantised, stored_decoder, write_folder
from mmspeed.models.weights import quiet
from mmspeed.protocols import source_of
from tests.support.language_models import loaded, oracle, saved

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    saved("deepseek_v3", folder)
    return folder


@pytest.fixture
def copy(deepseek: Path, tmp_path: Path) -> Path:
    return shutil.copytree(deepseek, tmp_path / "model")


def edited(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})


def configured(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_assembled_tensor_is_read_part_by_part() -> None:
    """The round trip: any part of it is that part of the whole, from the parts of files that it lies on."""
    assembly = Stacked((Joined(("a", "b")), Joined(("c", "d"))))
    whole = torch.arange(2 * 6 * 4).reshape(2, 6, 4)
    files = dict(taken_apart(assembly, whole))
    shapes = {name: tuple(tensor.shape) for name, tensor in files.items()}
    assert shapes == part_shapes(assembly, (2, 6, 4)) and shape_of(assembly, shapes) == (2, 6, 4)
    assert shape_of(assembly, {**shapes, "d": (2, 4)}) is None and shape_of(assembly, {"a": (3, 4)}) is None
    for begin in range(3):
        for end in range(begin, 3):
            for first in range(7):
                for last in range(first, 7):
                    part = (slice(begin, end), slice(first, last), slice(1, 3))
                    got = read_part(assembly, part, shapes, lambda name, one: files[name][one])
                    assert torch.equal(got, whole[part])


def test_scales_of_ragged_blocks() -> None:
    """300 x 500 numbers have 3 x 4 scales, the last ones of 44 rows and 116 columns."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(300, 500, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 4, generator=generator) + 0.5
    whole = torch.empty(300, 500)
    for row in range(300):
        for column in range(4):
            span = slice(128 * column, 128 * column + 128)
            whole[row, span] = value[row, span].float() * scale[row // 128, column]
    for part in [
        (slice(0, 300), slice(0, 500)),
        (slice(100, 150), slice(0, 500)),
        (slice(255, 300), slice(383, 499)),
        (slice(5, 5), slice(0, 500)),
    ]:
        got = dequantised(value[part], part, (128, 128), lambda wanted: scale[wanted])
        assert got.dtype == torch.float32 and torch.equal(got, whole[part])


def test_a_folder_in_fp8_is_the_one_of_its_multiplied_numbers(copy: Path) -> None:
    plain = loaded(copy)
    quantised: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("_proj.weight") and "kv_a" not in name:
                blocks = tuple(-(-size // 10) for size in tensor.shape)
                scale = torch.linspace(0.5, 2, blocks[0] * blocks[1]).view(blocks)
                wide = scale.repeat_interleave(10, 0)[: len(tensor)].repeat_interleave(10, 1)[:, : tensor.shape[1]]
                tensors[name] = (tensor / wide).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = scale
                quantised[name] = tensors[name].float() * wide

    edited(copy, quantise)
    configured(copy, quantization_config={"quant_method": "fp8", "weight_block_size": [10, 10]})
    model = loaded(copy)
    assert len(quantised) > 60
    for name, tensor in model.state_dict().items():
        stored = f"model.{name}"
        wanted = quantised.get(stored, plain.state_dict()[name])
        if name.endswith("experts.down_proj"):
            wanted = torch.stack(
                [quantised[f"{stored.removesuffix('.down_proj')}.{n}.down_proj.weight"] for n in range(8)]
            )
        elif name.endswith("experts.gate_up_proj"):
            stem = stored.removesuffix(".gate_up_proj")
            pairs = [[quantised[f"{stem}.{n}.{part}_proj.weight"] for part in ("gate", "up")] for n in range(8)]
            wanted = torch.stack([torch.cat(pair) for pair in pairs])
        assert torch.equal(tensor, wanted), name


def test_shards_are_read_and_written(copy: Path, tmp_path: Path) -> None:
    with quiet():
        oracle("deepseek_v3").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    ours = loaded(tmp_path / "shards")
    for name, tensor in loaded(copy).state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    write_folder(ours, tmp_path / "shards", tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    with pytest.raises(UserError, match="exists already"):
        write_folder(ours, tmp_path / "shards", tmp_path / "out")
    for name, tensor in loaded(tmp_path / "out").state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def lacks_expert(folder: Path) -> None:
    edited(folder, lambda tensors: [tensors.pop(f"model.layers.1.mlp.experts.{n}.up_proj.weight") for n in (3, 5)])


def holds_more(folder: Path) -> None:
    edited(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.other.weight": torch.ones(2)}))


def lacks_scales(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edited(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lacks_expert,
            r"lacks `model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight`, `.*5\.up_proj\.weight` \(2 missing, 0 surplus",
        ),
        (holds_more, r"holds `model\.layers\.0\.self_attn\.other\.weight`, which the model does not have"),
        (
            lambda folder: configured(folder, kv_lora_rank=14),
            r"and \d+ more in another shape: \(20, 32\) there, \(22, 32\) by",
        ),
        (lambda folder: configured(folder, model_type="mamba"), r"models of type 'mamba' are not read"),
        (lambda folder: configured(folder, scoring_func="softmax"), r"scoring_func 'softmax' is not computed"),
        (
            lambda folder: configured(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            r"kind dynamic are refused: their angles depend on the longest sequence met so far",
        ),
    ],
)
def test_files_that_do_not_fit_are_one_line(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=rf"^model\.pretrained: .*{message}") as caught:
        stored_decoder(str(copy))
    assert "\n" not in str(caught.value)


def test_numbers_of_fp8_without_scales_are_an_error(copy: Path) -> None:
    lacks_scales(copy)
    with pytest.raises(
        UserError, match=r"needs scales `model\.layers\.0\.mlp\.up_proj\.weight_scale_inv` of \(1, 1\).*lacks them"
    ):
        loaded(copy)


def test_other_weights_have_another_fingerprint(copy: Path) -> None:
    def mark() -> str:
        source = source_of(stored_decoder(str(copy)))
        assert isinstance(source, HubWeights)
        return source.fingerprint

    before = mark()
    assert mark() == before
    edited(copy, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] + 1}))
    assert mark() != before
