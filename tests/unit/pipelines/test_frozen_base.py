"""Runs beside a base of one byte a number: they learn what runs beside the numbers of these bytes learn, and no way of saving memory changes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspeed.config import Config, make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.models.frozen_linear import Kind, dequantised, quantised
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.inference.language import export_language_run
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.covers import slow_but
from tests.support.experts import experts_config
from tests.support.foreign_training import HALF as SPARSE
from tests.support.runs import CLIPS, losses
from tests.support.tiny_repositories import REPOSITORIES, save_wan_experts
from tests.unit.pipelines.test_adapter_memory import HALF, WAYS, adapted, save_base, trained
from tests.unit.pipelines.test_export_adapters import language_run
from tests.unit.pipelines.test_family_chain import BUCKETS, IMAGES, VIDEO, pictures

ADAPTER = "{kind: lora, rank: 3, alpha: 6, targets: attention+mlp}"
IN_BLOCKS = re.compile(r"^(model\.)?\w*(blocks|layers)\.\d+\..+\.weight$")
MakeConfig = Callable[..., Config | LanguageConfig]


def wan(folder: Path, sparse: str = "null") -> MakeConfig:
    save_base(folder)
    return lambda name, *overrides: adapted(folder, name, f"model.sparse={sparse}", *overrides)


def two_experts(folder: Path) -> MakeConfig:
    save_wan_experts(folder / "base")
    return lambda name, *overrides: experts_config(folder, f"name={name}", f"model.adapter={ADAPTER}", *overrides)


def family(folder: Path, name: str) -> MakeConfig:
    REPOSITORIES[name](folder / "base")
    sources = pictures(folder / "pictures") if name in IMAGES else CLIPS
    data = f"data.buckets=[{BUCKETS.get(name, VIDEO)}]", f"data.sources=[{{path: {sources}}}]", "data.limit=5"
    adapter = f"model.adapter={ADAPTER}"
    return lambda run, *overrides: experts_config(folder, f"name={run}", adapter, *data, *overrides, weighting="step")


def decoder(folder: Path, shape: str) -> MakeConfig:
    base = export_language_run(language_run(folder, "first", shape=shape), folder / "base").folder
    tree = {
        "task": "language",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.0},
        "model": {"pretrained": str(base)},
        "sequence_length": 64,
        "train": {"steps": 3, "batch_size": 2, "lr": 5e-2, "warmup_steps": 0, "log_every": 1},
        "device": {"kind": "cpu"},
    }
    return lambda name, *overrides: make_config(tree, (f"name={name}", f"model.adapter={ADAPTER}", *overrides))


MODELS: dict[str, Callable[[Path], MakeConfig]] = {
    "wan": wan,
    "wan, sparse": partial(wan, sparse=f"{{{SPARSE}}}"),
    "two experts": two_experts,
    "decoder": partial(decoder, shape="tiny-qwen3-0.6b"),
    **{name: partial(family, name=name) for name in REPOSITORIES if name != "wan"},
}


def run(config: Config | LanguageConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run and its checkpoint."""
    TrainPipeline(config, online=True).run()
    return losses(config), whole_checkpoint(config.run_dir)


def round_files(base: Path, kind: Kind) -> None:
    """Write the numbers that bytes stand for into a repository's files, in place of the weights of linear layers in blocks."""
    for path in base.rglob("*.safetensors"):
        if path.parent.name.startswith("transformer") or path.parent == base:
            tensors = load_file(path)
            for name, weight in tensors.items():
                if IN_BLOCKS.search(name) and weight.ndim == 2:
                    tensors[name] = dequantised(*quantised(weight, kind), torch.float32)
            save_file(tensors, path, metadata={"format": "pt"})


def sampled(config: Config | LanguageConfig) -> torch.Tensor:
    """A video of a run."""
    [video] = TextToVideo.from_run(config.run_dir, device="cpu")("a rabbit on a meadow", steps=2)
    return torch.from_numpy(video.frames_FHWC)


@pytest.mark.parametrize("kind", ["int8", pytest.param("float8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(MODELS, {"wan", "two experts"}))
def test_bytes_learn_what_their_numbers_learn(tmp_path: Path, name: str, kind: Kind) -> None:
    make = MODELS[name](tmp_path)
    ways = ("device.dtype=bfloat16", "train.lr=1e-2")
    other, _ = run(make("before", *ways, "model.base.dtype=bfloat16"))  # fills the cache
    config = make("bytes", *ways, f"model.base.dtype={kind}")
    found, saved = run(config)
    video = sampled(config) if name == "two experts" else None
    round_files(tmp_path / "base", kind)
    config = make("numbers", *ways, "model.base.dtype=bfloat16")
    true, tensors = run(config)
    assert found == pytest.approx(true, rel=1e-5) and found != pytest.approx(other, rel=1e-5) and len(found) > 2
    few, all_bits = ({key: value for key, value in each.items() if ".lora_" in key} for each in (saved, tensors))
    assert not differing(few, all_bits)
    assert video is None or torch.equal(video, sampled(config))


# bfloat16 is rounded in other places, beside a bfloat16 base as much
ROUNDED = ("memory.mlp_chunk=7", "train.compile=true")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    save_base(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize(("way", "beside"), [*WAYS, (("memory.budget=1GB",), ())], ids=lambda keys: " ".join(keys[:1]))
def test_ways_of_memory_change_nothing_that_is_learned(
    home: Path, way: tuple[str, ...], beside: tuple[str, ...], kind: Kind
) -> None:
    base = ("device.dtype=bfloat16", f"model.base.dtype={kind}")
    runs = ([key for key in keys if key not in HALF] for keys in (way, beside))
    (found, frozen, _), (plain, same, _) = (trained(home, *keys, *base) for keys in runs)
    assert found == pytest.approx(plain, rel=5e-4 if way[0] in ROUNDED else 1e-5) and len(set(found)) > 1
    assert frozen.keys() == same.keys() and all(torch.equal(value, same[name]) for name, value in frozen.items())
    assert sum(value.element_size() == 1 for value in frozen.values()) == 2 * 10
