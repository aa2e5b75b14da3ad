"""Adapter files: what official readers compute from the authors' names, what a run begins with, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import lora_conversion_utils, lora_pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import load_start
from mmspeed.models.adapter_files import METADATA, from_authors, read_adapter, to_authors
from mmspeed.pipelines.inference.export_adapter import export_adapter
from tests.support.covers import slow_but
from tests.support.official_pipelines import load_official, made_run, narrowed
from tests.support.tiny_repositories import REPOSITORIES, save_wan
from tests.unit.pipelines.test_export_adapters import LORA, adapted_run, distance, first_output

AUTHORS = ("wan", "ltx", "qwen-image", "hunyuan-video")
# layers outside the blocks, and some of them, of which diffusers and ComfyUI have a common name
OUTSIDE = {
    "wan": ["to_q", "linear_1", "linear_2", "time_proj", "net.0.proj", "proj_out"],
    "ltx": ["to_q", "caption_projection.linear_1", "proj_out"],
    "qwen-image": ["to_q", "img_in", "txt_in", "linear_1", "linear_2", "norm_out.linear", "proj_out"],
    "hunyuan-video": ["transformer_blocks.*.attn.to_q", "context_embedder.proj_in", "proj_out"],
}  # fmt: skip
KEY = "train.start_from"
KIND = "WanTransformer3DModel"
ADAPTED = {"blocks.0.attn1.to_q": (3, 5), "blocks.0.attn1.to_k": (3, 5)}
OUTPUTS = dict.fromkeys(ADAPTED, 5)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the width of HunyuanVideo in diffusers' reader, which knows that of the published model alone."""

    def set_width(width: int) -> None:
        name = "_convert_hunyuan_video_lora_to_diffusers"
        monkeypatch.setattr(lora_pipeline, name, narrowed(lora_conversion_utils, name, width))

    return set_width


@pytest.mark.parametrize("family", slow_but(AUTHORS, {"wan", "hunyuan-video"}))
@pytest.mark.parametrize("targets", ["attention", "attention+mlp", "outside"])
def test_official_readers_compute_what_the_run_does(
    tmp_path: Path, family: str, targets: str, narrow: Callable[[int], None]
) -> None:
    from peft.tuners.lora import LoraLayer

    base, out = REPOSITORIES[family](tmp_path / "base"), tmp_path / "out"
    if family == "hunyuan-video":
        targets = targets.replace("attention+mlp", "blocks")
        narrow(load_official(base).transformer.x_embedder.proj.out_channels)
    run, model = adapted_run(tmp_path, base, {**LORA, "targets": OUTSIDE[family] if targets == "outside" else targets})
    written = export_adapter(run, out, format="original")
    stored = load_file(out / "pytorch_lora_weights.safetensors")
    assert all(name.startswith("diffusion_model.") and not name.endswith(".alpha") for name in stored)
    pipeline, own = load_official(base), load_official(base)
    before = first_output(pipeline, family)
    pipeline.load_lora_weights(str(out))
    loaded = first_output(pipeline, family)
    applied = {name for name, layer in pipeline.transformer.named_modules() if isinstance(layer, LoraLayer)}
    here = {name for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert here <= applied and written.layers == len(here)
    assert all(
        not torch.cat([*pipeline.transformer.get_submodule(name).lora_B.parameters()]).any() for name in applied - here
    )
    own.register_modules(transformer=model.eval())
    truth = first_output(own, family)
    assert distance(before, truth) > 0.1 and distance(loaded, truth) < 1e-6


@pytest.mark.parametrize("family", ["flux", "cogvideox-5b", "mochi", "hunyuan-video-1.5"])
def test_families_without_such_readers_are_refused(tmp_path: Path, family: str) -> None:
    run, _ = adapted_run(tmp_path, REPOSITORIES[family](tmp_path / "base"))
    with pytest.raises(
        UserError, match=r"--format original: .* has no file of its authors' names: .*(reads|loads|ComfyUI)"
    ):
        export_adapter(run, tmp_path / "out", format="original")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, targets",
    [("ltx", "time_embed.linear"), ("hunyuan-video", "refiner_blocks.*.attn.to_q"), ("wan", "proj_out")],
)
def test_layers_without_a_common_name_are_refused_by_name(tmp_path: Path, family: str, targets: str) -> None:
    run, _ = adapted_run(tmp_path, REPOSITORIES[family](tmp_path / "base"), {**LORA, "targets": [targets]})
    reason = (
        rf"know no common name of `.*{targets.rpartition('.')[2]}`" if family != "wan" else "by `blocks.`, and none"
    )
    with pytest.raises(UserError, match=f"--format original: diffusers .*{reason}"):
        export_adapter(run, tmp_path / "out", format="original")
    assert not (tmp_path / "out").exists()


def test_fused_layers_come_back_whole() -> None:
    kind = "HunyuanVideoTransformer3DModel"
    block = "single_transformer_blocks.1"
    parts = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp"]
    outputs = {"transformer_blocks.0.attn.to_q": 4, **dict(zip(parts, (4, 4, 4, 16), strict=True))}
    outputs |= {f"transformer_blocks.0.attn.to_{part}": 4 for part in "kv"}
    layers = {
        name: (torch.randn(2, 6), torch.randn(outputs[name], 2))
        for name in (*parts[:2], "transformer_blocks.0.attn.to_q")
    }
    tensors = to_authors(kind, layers, 0.5, outputs, KEY)
    assert tensors["diffusion_model.single_blocks.1.linear1.lora_A.weight"].shape == (4, 6)
    assert tensors["diffusion_model.single_blocks.1.linear1.lora_B.weight"].shape == (28, 4)
    names = {name.removeprefix("diffusion_model.").partition(".lora_")[0] for name in tensors}
    stored = {n: tuple(tensors[f"diffusion_model.{n}.lora_{side}.weight"] for side in "AB") for n in names}
    back = from_authors(kind, stored, list(layers), 2, outputs, KEY)  # type: ignore[arg-type]
    for name, (down, up) in layers.items():
        assert torch.equal(back[name][0], down) and torch.equal(back[name][1], up * 0.5)
    with pytest.raises(UserError, match=r"changes single_transformer_blocks.1.attn.to_k, which has no adapter here"):
        shared = {n: (torch.randn(2, 6), torch.randn(len(pair[1]), 2)) for n, pair in stored.items()}
        from_authors(kind, shared, [parts[0], parts[2], parts[3], "transformer_blocks.0.attn.to_q"], 2, outputs, KEY)


def named(prefix: str, down: str = "lora_A", up: str = "lora_B") -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    names = [name.replace("attn1.to_", "self_attn.") if prefix.startswith("diffusion") else name for name in ADAPTED]
    return {
        f"{prefix}{name}.{side}.weight": torch.randn(shape, generator=seeded)
        for name in names
        for side, shape in ((down, (2, 3)), (up, (5, 2)))
    }


METADATA_OF_4 = {METADATA: json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})}
ALPHAS = {f"diffusion_model.blocks.0.self_attn.{part}.alpha": torch.tensor(4.0) for part in "qk"}


@pytest.mark.parametrize(
    "tensors, metadata, settings, scale",
    [
        (named("transformer."), METADATA_OF_4, None, 2.0),
        (named("base_model.model."), None, {"r": 2, "lora_alpha": 4, "use_rslora": True}, 4 / 2**0.5),
        (named("diffusion_model."), None, None, 1.0),
        (named("diffusion_model.", "lora_down", "lora_up") | ALPHAS, None, None, 2.0),
    ],
    ids=["diffusers", "peft", "authors", "authors-alpha"],
)
def test_files_keep_their_effect(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None, settings: Any, scale: float
) -> None:
    save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)
    if settings is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    read = read_adapter(tmp_path / "a.safetensors", KIND, ADAPTED, 2, 2.0, OUTPUTS, KEY)
    matrices = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    for number, layer in enumerate(ADAPTED):
        down, up = matrices[2 * number], matrices[2 * number + 1]
        assert torch.equal(read[layer][0], down) and torch.equal(read[layer][1], up * (scale / 2.0))


WHOLE = named("transformer.")
FIRST = next(iter(WHOLE))


@pytest.mark.parametrize(
    "tensors, metadata, message",
    [
        (WHOLE, None, "does not say its alpha"),
        ({n.removeprefix("transformer."): t for n, t in WHOLE.items()}, None, "under none of `transformer.`"),
        ({n: t for n, t in WHOLE.items() if n != FIRST}, METADATA_OF_4, r"is not whole: `.*to_q: no lora_A`"),
        ({n: t for n, t in WHOLE.items() if "to_q" not in n}, METADATA_OF_4, r"has no adapter of `.*to_q`"),
        (
            WHOLE | {n.replace("to_q", "to_v"): t.clone() for n, t in WHOLE.items() if "to_q" in n},
            METADATA_OF_4,
            r"has adapters of `.*to_v`.* none here",
        ),
        (WHOLE | {f"{FIRST}.extra": torch.ones(2)}, METADATA_OF_4, r"extra`, which is no part of a LoRA"),
        (WHOLE | {FIRST: torch.ones(2, 4)}, METADATA_OF_4, r"lora_A of `.*to_q` is \(2, 4\) there, \(2, 3\) here"),
        (WHOLE | {"transformer.blocks.0.attn1.to_q.dora_scale": torch.ones(5)}, METADATA_OF_4, "of DoRA"),
        ({n: t.to(torch.float8_e4m3fn) for n, t in WHOLE.items()}, METADATA_OF_4, "F8_E4M3 without scales"),
        (WHOLE, {METADATA: json.dumps({"transformer.lora_alpha": 4, "transformer.alpha_pattern": {"a": 1}})}, "alpha_pattern"),
        (named("diffusion_model."), None, r"rank 3 here"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_an_error_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None, message: str
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    with pytest.raises(UserError, match=f"train.start_from: .*a.safetensors.*{message}"):
        read_adapter(path, KIND, ADAPTED, 3 if "rank" in message else 2, 2.0, OUTPUTS, KEY)


def test_a_run_begins_with_the_adapters_of_another(tmp_path: Path) -> None:
    base = save_wan(tmp_path / "base")
    run, model = adapted_run(tmp_path, base)
    whole, bare = made_run(tmp_path, base, 0, name="whole")
    _, fresh = adapted_run(tmp_path, base, name="fresh")
    for parameter in fresh.parameters():
        parameter.data.zero_()
    load_start(run, fresh)
    for (name, own), (_, other) in zip(fresh.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(own, other if ".lora_" in name else torch.zeros_like(own))
    _, wide = adapted_run(tmp_path, base, {**LORA, "rank": 4}, name="wide")
    _, more = adapted_run(tmp_path, base, {**LORA, "targets": "attention+mlp"}, name="more")
    for place, other, message in (
        (whole, fresh, "holds no adapters, but whole weights"),
        (run, bare, "holds adapters alone.*--format merged"),
        (run, wide, r"\(3, 24\) in the checkpoint, \(4, 24\) here: compare model.adapter.rank"),
        (run, more, "has no tensor .*ffn.*: compare model.adapter.rank and targets"),
    ):
        with pytest.raises(UserError, match=f"train.start_from: checkpoint .*{message}"):
            load_start(place, other)
