"""`mmspeed check --parallel` of the language task: layouts that compute what one process does, and a reduction that is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmspeed.__main__ import main
from mmspeed.config import load_config, make_config
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.mesh import process_group
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel.tensor import check_heads
from mmspeed.pipelines.check.layouts import with_layout
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.domains.language.small import shrunk_settings, write_model
from mmspeed.protocols import RunPlace


def written(folder: Path, shape: str = "qwen3-8b", **keys: Any) -> Path:
    """A config whose texts are nowhere: the check reads none."""
    path = folder / "run.yaml"
    tree = {
        "task": "language",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "texts.jsonl")}], "cache": str(folder / "cache")},
        "model": {"shape": shape},
        "objective": {"z_loss": 1e-3},
        "device": {"kind": "cpu"},
        **keys,
    }
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


LAYOUTS = {
    "ulysses": ("qwen3-0.6b", "ulysses=2", ("all_to_all ulysses", "all_gather sequence")),
    "tp": ("deepseek-v3", "tp=2", ("all_gather tp", "reduce_scatter tp", "all_reduce tp")),
    "fsdp": ("qwen3-30b-a3b", "dp_shard=2", ()),
    "tp and ulysses": ("llama3-8b", "tp=2,ulysses=2", ("all_gather tp", "all_to_all ulysses")),
    "ring": ("deepseek-v3", "ring=2", ("ring ring", "all_gather sequence")),
    "stages, tied embeddings": ("qwen3-0.6b", "pp=2,tp=2", ("all_gather tp", "reduce_scatter tp", "all_reduce tp")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_layout_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, layout, sent = LAYOUTS[name]
    assert main(["check", str(written(tmp_path, shape)), "--parallel", layout]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "packs: the 5 gradients of" in text
    assert all(exchange in text for exchange in sent), text


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["sequence", "global_batch"])
def test_auxiliary_losses_pass(balance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"shape": "qwen3-30b-a3b", "balance": balance, "windows": [7, None]}
    path = written(tmp_path, model=model, objective={"balance": 0.5})
    for layout in ("dp_shard=2", "ring=2"):
        assert main(["check", str(path), "--parallel", layout]) == 0
        text = capsys.readouterr().out
        assert "PASSED" in text and ("compared with model.balance: micro_batch" in text) == (balance == "global_batch")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ulysses=2", "tp=2", "dp_shard=2", "dp_replicate=2"])
def test_adapters_pass(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They alone have gradients: A and B of seven layers of three blocks."""
    write_model(tiny_twin(SHAPES["qwen3-8b"].settings), tmp_path / "hub", seed=1)
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "targets": "attention+mlp"}
    path = written(tmp_path, model={"pretrained": str(tmp_path / "hub"), "adapter": adapter}, objective={})
    assert main(["check", str(path), "--parallel", layout]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "packs: the 5 gradients of 42 that" in text and ".lora_A.default.weight" in text


def test_a_layout_that_does_not_fit_the_decoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout, message in (
        ("tp=3", "the model's 32 heads cannot be divided among the 3 devices"),
        ("tp=16", "the model's 8 heads of keys cannot be divided among the 16 devices"),
        ("ulysses=2,tp=2,dp_shard=8", "at most 16 are tried"),
        ("pp=8,virtual=8", "the model has 36 blocks: each stage needs one, so use parallel.virtual 4 or parallel.pp 4"),
    ):
        assert main(["check", str(written(tmp_path)), "--parallel", layout]) == 1
        assert message in capsys.readouterr().err
    rows = written(tmp_path, model={"shape": "qwen3-8b", "vocab_size": 1001})
    assert main(["check", str(rows), "--parallel", "tp=2"]) == 1
    assert "set model.vocab_size: 1002" in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "ulysses"), [(1, 1), (2, 1), (4, 1), (2, 4), (8, 2)])
def test_a_small_decoder_fits_where_the_decoder_does(tp: int, ulysses: int) -> None:
    parallel = ParallelConfig(tp=tp, ulysses=ulysses)
    for name in ("qwen3-8b", "deepseek-v3", "pangu-ultra-moe"):
        small = shrunk_settings(SHAPES[name].settings, parallel)
        check_heads(small.num_attention_heads, ulysses, tp, small.num_key_value_heads)
        assert small.vocab_size % tp == SHAPES[name].settings.vocab_size % tp == 0 and small.intermediate_size % tp == 0
        assert small.num_attention_heads <= 64 and small.vocab_size <= 256


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "pangu-ultra-moe"])
def test_the_small_run_is_of_the_shrunk_settings(name: str, tmp_path: Path) -> None:
    """By keys of the shape, and of a folder by a smaller folder."""
    folders = [] if "pangu" in name else [tmp_path / "hub"]
    for folder in folders:
        write_model(tiny_twin(SHAPES[name].settings), folder, seed=1)
    for model in ({"shape": name, "windows": [7, None]}, *({"pretrained": str(folder)} for folder in folders)):
        config = with_layout(load_config(written(tmp_path, model=model)), "tp=2")
        domain = LanguageDomain(config)
        small = domain.small(tmp_path / next(iter(model))).config
        again = LanguageDomain(make_config(small.model_dump(mode="json", by_alias=True)))
        with process_group(Device("cpu", 0)):
            again.open(RunPlace(Device("cpu", 0)))
        wanted, found = vars(shrunk_settings(domain.settings, config.parallel)), vars(again.settings)
        unused = {"head_dim"} if again.settings.latent is not None else set()  # latent attention has widths of its own
        assert {key for key in wanted if wanted[key] != found[key]} <= unused
        assert {type(again.build()["model"])} == {type(domain.build()["model"])}
