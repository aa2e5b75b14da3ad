"""Fine-tuning a published model from a config alone: init, check, a first epoch, a resume, and the check of a layout."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mmspeed.cli.check import model_lines
from mmspeed.cli.init import write_config
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Config, load_config, make_config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.sections import size_warnings, videos_of
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.preprocess import check
from mmspeed.shapes import Bucket
from tests.support.tiny_repositories import save_wan

SMALL = (
    "data.limit=4", "data.buckets=[{frames: 13, height: 32, width: 48}]", "data.val_fraction=0", "validate.prompts=[]",
    "train.steps=3", "train.log_every=1", "train.ema_decay=null", "train.micro_batch_size=null", "memory.fraction=null",
    "device.dtype=float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny repository and the config that `init` writes for it."""
    folder = tmp_path_factory.mktemp("tuned")
    save_wan(folder / "tiny-wan")
    write_config(folder / "own.yaml", model=str(folder / "tiny-wan"))
    return folder


def small(home: Path, *overrides: str) -> Config:
    return load_config(home / "own.yaml", (*SMALL, *overrides))


def test_init_fits_buckets_to_the_model(home: Path) -> None:
    config = load_config(home / "own.yaml")
    assert (config.model.kind, config.vae.kind, config.text.kind, config.objective.kind) == (
        "diffusers", "diffusers", "family", "family",
    )  # fmt: skip
    assert config.data.fps == 16.0 and config.train.lr == 1e-5
    card = config.train.micro_batch_size, config.memory.fraction, config.device.dtype
    assert card == (1, 0.9, "bfloat16")
    assert all(b.frames % 4 == 1 and b.height % 16 == 0 and b.width % 16 == 0 for b in config.buckets)


def test_shapes_are_counted_without_weights_which_training_needs(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "tiny-wan", tmp_path / "bare")
    (tmp_path / "bare" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    config = small(
        home,
        f"model.pretrained={tmp_path / 'bare'}",
        "memory.budget=1GB",
        f"output={tmp_path}",
        f"data.cache={tmp_path}/c",
    )
    said = "\n".join([*check(config).lines(), *model_lines(config, check(config))])
    assert "; no weights in its folder: training needs them" in said and "budget 1.0 GB: 2 x save" in said
    with pytest.raises(UserError, match=r"^model\.pretrained: .* holds no diffusion_pytorch_model\.safetensors$"):
        TrainPipeline(config, online=True).run()


@pytest.mark.slow
def test_init_knows_short_names(tmp_path: Path) -> None:
    write_config(tmp_path / "a.yaml", model="wan2.1-1.3b")
    assert "pretrained: Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in (tmp_path / "a.yaml").read_text()
    write_config(tmp_path / "c.yaml", model="cogvideox-5b-i2v")  # which makes videos from images alone
    config = load_config(tmp_path / "c.yaml")
    assert config.conditioning.shares == {"first": 1.0} and config.validate_.prompts == ()
    assert {(b.height, b.width) for b in config.buckets} == {(480, 720)} and config.data.allow_upscale
    assert "other frames than the 49 whose positions" in size_warnings(config.model, config.buckets)[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wan", "wan is no whole name; did you mean 'wan2.1-1.3b', the commonest of wan2.1-1.3b, wan2.1-14b, "),
        ("Wan22", "did you mean 'wan2.2-5b', the commonest of wan2.2-5b, wan2.2-a14b"),
        ("Wan2.1-T2V-14B", r"did you mean 'wan2.1-14b'\?$"),
        ("wan2.1-1b", "is no short name, no hub id .* did you mean 'wan2.1-14b'"),
        ("nowhere", r"nowhere is no short name, .* and no folder \(short names: wan2.1-1.3b, "),
    ],
)
def test_a_part_of_a_name_is_answered_with_the_commonest_of_its_models(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        videos_of(name)


def test_check_counts_the_model_and_its_tokens(home: Path) -> None:
    report = check(small(home))
    assert not report.problems
    lines = "\n".join(report.lines())
    assert "tiny-wan" in lines and "24 tokens of the model" in lines


def test_the_small_model_of_a_layout_is_of_the_same_class(home: Path, tmp_path: Path) -> None:
    mini = VideoDomain(small(home)).small(tmp_path / "small")
    model = VideoDomain(make_config(mini.config.model_dump(mode="json", by_alias=True))).outlines()["model"]
    assert "WanTransformer3DModel" in mini.model and type(model).__name__ == "WanTransformer3DModel"


def test_thresholds_of_a_model_without_memory_begin_at_their_value(home: Path) -> None:
    for tau in (None, 0.25):
        sparse = (
            f"model.sparse={{rule: threshold, tau: {'null' if tau is None else tau}, dense_first: 0, dense_last: 0}}"
        )
        layers = clustered_layers(VideoDomain(small(home, sparse)).outlines()["model"])
        assert layers and all(math.isnan(layer.tau) if tau is None else layer.tau == tau for layer in layers.values())


def test_an_objective_of_a_repository_needs_one(tmp_path: Path) -> None:
    tree = f"data: {{sources: [{{path: {tmp_path}}}], buckets: [{{frames: 1, height: 16, width: 16}}]}}\n"
    (tmp_path / "own.yaml").write_text(tree + "objective: {kind: family}\n")
    with pytest.raises(UserError, match=r"objective.kind: family is that of a published model"):
        VideoDomain(load_config(tmp_path / "own.yaml"))


def test_sizes_far_from_the_model_are_warned_of() -> None:
    section = PublishedModelConfig(kind="diffusers", pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    far, near, long = Bucket(81, 128, 128), Bucket(33, 480, 480), Bucket(401, 480, 832)
    lines = size_warnings(section, (far, near, long))
    assert len(lines) == 2 and "81x128x128 has 0.041 times the pixels of the 480x832" in lines[0]
    assert "401x480x832 has more than 4 times the 81 frames" in lines[1]
    assert size_warnings(PublishedModelConfig(kind="diffusers", pretrained="own/model"), (far,)) == []


def test_check_names_latents_that_the_model_does_not_take(home: Path) -> None:
    report = check(small(home, "vae={kind: linear, channels: 4}"))
    assert "takes 16 channels and returns 16, the latents here have 4" in report.problems[0]


def test_another_base_on_resume_is_an_error(home: Path) -> None:
    TrainPipeline(small(home, "name=based", "data.cache=cache", "train.steps=1"), online=True).run()
    record = json.loads((home / "runs" / "based" / "run.json").read_text())
    assert record["base"] == {"model": Repository.open(str(home / "tiny-wan")).fingerprint}
    path = home / "tiny-wan" / "transformer" / "diffusion_pytorch_model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    tensors["proj_out.bias"] += 1
    save_file(tensors, path)
    try:
        with pytest.raises(UserError, match=r"based was started from another base: .*model\.pretrained"):
            TrainPipeline(small(home, "name=based", "data.cache=cache", "train.steps=2")).run()
    finally:
        path.write_bytes(before)
    TrainPipeline(small(home, "name=based", "data.cache=cache", "train.steps=2")).run()
