"""A run is exported as a repository that diffusers' class and official pipeline load, with the weights of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmspeed.__main__ import main
from mmspeed.config import Config, load_config
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.export import export_run
from tests.support.checkpoints import whole_checkpoint
from tests.support.official_pipelines import place_alike
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import save_wan
from tests.unit.pipelines.test_fine_tuning import SMALL, write_config

KEPT = ("time_embedder", "scale_shift_table", "norm2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with its repository."""
    folder = tmp_path_factory.mktemp("exported")
    save_wan(folder / "tiny-wan")
    write_config(folder / "own.yaml", model=str(folder / "tiny-wan"))
    TrainPipeline(config_of(folder, "own"), online=True).run()
    return folder


def config_of(home: Path, name: str, *overrides: str) -> Config:
    changes = (f"name={name}", "data.cache=cache", "train.steps=2", "train.ema_decay=0.9", "train.lr=1e-3")
    return load_config(home / "own.yaml", (*SMALL, f"text.pretrained={home / 'tiny-wan'}", *changes, *overrides))


def weights_of(home: Path, name: str, which: str) -> dict[str, Tensor]:
    """The weights of a run's newest checkpoint, by the model's names."""
    tensors = whole_checkpoint(home / "runs" / name)
    return {key.removeprefix(f"{which}."): tensor for key, tensor in tensors.items() if key.startswith(f"{which}.")}


def latents_of(pipeline: Any) -> Tensor:
    """Latents of two sampling steps with guidance."""
    pipeline.set_progress_bar_config(disable=True)
    g = torch.Generator().manual_seed(5)
    return pipeline(
        prompt="a rabbit runs", negative_prompt="", height=32, width=48, num_frames=9, num_inference_steps=2,
        generator=g, output_type="latent",
    ).frames  # fmt: skip


def test_the_class_and_the_official_pipeline_load_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    out = home / "out"
    assert main(["export", str(home / "runs" / "own"), "-o", str(out), "--shard-size", "100KB"]) == 0
    assert "transformer of step-00000002 (ema)" in capsys.readouterr().out
    assert len(list((out / "transformer").glob("*.safetensors"))) > 1
    assert not (out / "transformer" / "config.json").is_symlink() and (out / "vae" / "config.json").is_symlink()
    averages = weights_of(home, "own", "ema")
    before = load_file(home / "tiny-wan" / "transformer" / "diffusion_pytorch_model.safetensors")
    loaded = WanTransformer3DModel.from_pretrained(out, subfolder="transformer")
    assert loaded.state_dict().keys() == averages.keys() == before.keys()
    assert all(torch.equal(tensor, averages[name]) for name, tensor in loaded.state_dict().items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in averages.items())
    exported, base = WanPipeline.from_pretrained(out), WanPipeline.from_pretrained(home / "tiny-wan")
    place_alike(exported, base)
    of_base = latents_of(base)
    base.transformer.load_state_dict(averages)
    expected = latents_of(base)
    assert (latents_of(exported) - expected).abs().max() <= 1e-6
    assert (of_base - expected).abs().max() > 1e-4  # the run has moved them


def test_precisions_and_copies(home: Path) -> None:
    """In half precision the class's own float32 parts stay; the copy stands without the base, with its small files."""
    out, base = home / "half", home / "tiny-wan"
    for name in ("LICENSE.txt", "transformer/notes.json"):
        (base / name).write_text(name)
    exported = export_run(home / "runs" / "own", out, weights="model", dtype=torch.bfloat16, others="copy")
    assert "vae" in exported.others and not any(path.is_symlink() for path in out.rglob("*"))
    for name in ("LICENSE.txt", "transformer/notes.json", "transformer/config.json", "model_index.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    contents = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    truth = weights_of(home, "own", "model")
    for name, tensor in contents.items():
        kept = any(part in KEPT for part in name.split("."))
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, truth[name].to(tensor.dtype)), name


def test_the_transformer_alone(home: Path) -> None:
    out = home / "alone"
    assert export_run(home / "runs" / "own", out, others="none").others == ()
    assert [path.name for path in out.iterdir()] == ["transformer"]


def test_what_cannot_be_exported_is_one_line(home: Path, tmp_path: Path) -> None:
    run = home / "runs" / "own"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*full exists already"):
        export_run(run, tmp_path / "full")
    with pytest.raises(UserError, match=r"has no checkpoint 9: there are latest, best and the steps"):
        export_run(run, tmp_path / "out", checkpoint=9)
    assert not any(path.name != "full" for path in tmp_path.iterdir())
    path = home / "tiny-wan" / "transformer" / "config.json"
    before = path.read_text()
    path.write_text(before.replace('"eps": 1e-06', '"eps": 1e-05'))
    try:
        with pytest.raises(UserError, match="was started from another base"):
            export_run(run, tmp_path / "out")
    finally:
        path.write_text(before)


def test_a_run_without_a_repository_is_offered_what_else_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        f"name: a\ndata: {{sources: [{{path: {tmp_path}}}], buckets: [{{frames: 1, height: 16, width: 16}}]}}\n"
    )
    with pytest.raises(UserError, match=r"names no repository .*mmspeed checkpoint merge-ema"):
        export_run(tmp_path, tmp_path / "out")


def trained(folder: str, overrides: tuple[str, ...]) -> None:
    TrainPipeline(config_of(Path(folder), "ranks", *overrides)).run()


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_and_halves_of_masters(home: Path) -> None:
    from diffusers import WanTransformer3DModel

    run_ranks(trained, 2, str(home), ("parallel.strategy=fsdp", "memory.master=split", "device.dtype=bfloat16"))
    export_run(home / "runs" / "ranks", home / "of-ranks")
    loaded = WanTransformer3DModel.from_pretrained(home / "of-ranks", subfolder="transformer").state_dict()
    truth = weights_of(home, "ranks", "ema")
    assert loaded.keys() == truth.keys() and all(torch.equal(loaded[name], tensor) for name, tensor in truth.items())
