"""Exports of each family: the official pipeline loads the folder, with the checkpoint's weights, and the base's where none trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.config import make_config
from mmspeed.config.schema import PublishedModelConfig
from mmspeed.initialize import materialize, read_weights
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.models.build import repository_of, with_weights
from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.text_to_video import TextToVideo
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import source_of
from tests.support import tiny_repositories
from tests.support.covers import slow_but

NAMES = ("wan", "ltx", "cogvideox", "hunyuan_video", "mochi", "flux")
FAMILIES = {name: getattr(tiny_repositories, f"save_{name}") for name in NAMES}


def made_run(folder: Path, base: Path, frozen: int) -> tuple[Path, nn.Module]:
    """A run's folder with one checkpoint of the repository's model, moved; its first `frozen` parameters do not train."""
    tree: dict[str, Any] = {
        "name": "own",
        "output": str(folder / "runs"),
        "data": {"sources": [{"path": str(folder)}], "buckets": [{"frames": 9, "height": 32, "width": 48}]},
        "model": {"kind": "diffusers", "pretrained": str(base)},
        "train": {"ema_decay": None},
    }
    config = make_config(tree, (), origin="test")
    assert isinstance(config.model, PublishedModelConfig)
    model = with_weights(config.model, 16, 16, "meta")
    source = source_of(model)
    assert source is not None
    materialize(model, torch.device("cpu"))
    read_weights(model, source)
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
    run = RunFolder(config.run_dir)
    info = {"base": {"model": repository_of(config.model).fingerprint}, "latent_channels": 16, "text_width": 16}
    run.write_start(config, info, {})
    CheckpointManager(run.checkpoints).save(1, TrainingState(model), blocking=True)
    return run.root, model


@pytest.mark.parametrize("family", slow_but(FAMILIES, {"mochi"}))
def test_the_official_pipeline_loads_the_export(tmp_path: Path, family: str) -> None:
    from diffusers import DiffusionPipeline

    save: Callable[[Path], Path] = FAMILIES[family]
    run, model = made_run(tmp_path, save(tmp_path / "base"), frozen=2)
    exported = export_run(run, tmp_path / "out", shard_bytes=50_000)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    state = pipeline.transformer.state_dict()
    assert exported.tensors == len(state) and state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    base = DiffusionPipeline.from_pretrained(tmp_path / "base")
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(base.transformer.state_dict()[name], state[name]) for name in names[:2])
    assert pipeline.components.keys() == base.components.keys()
    assert {name: type(part) for name, part in pipeline.components.items()} == {
        name: type(part) for name, part in base.components.items()
    }


def test_sampling_takes_from_the_base_what_did_not_train(tmp_path: Path) -> None:
    run, model = made_run(tmp_path, tiny_repositories.save_wan(tmp_path / "base"), frozen=2)
    own = TextToVideo.from_run(run, device="cpu").model.state_dict()
    assert own.keys() == model.state_dict().keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())
