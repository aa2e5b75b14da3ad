"""Exports of each family: the official pipeline loads the folder, with the checkpoint's weights, and the base's where none trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.text_to_video import TextToVideo
from tests.support import tiny_repositories
from tests.support.covers import slow_but
from tests.support.official_pipelines import load_official, made_run, official_latents, place_alike, shape_of
from tests.support.tiny_repositories import REPOSITORIES


@pytest.mark.parametrize("family", slow_but(REPOSITORIES, {"mochi"}))
def test_the_official_pipeline_loads_the_export(tmp_path: Path, family: str) -> None:
    run, model = made_run(tmp_path, REPOSITORIES[family](tmp_path / "base"), frozen=2)
    exported = export_run(run, tmp_path / "out", shard_bytes=50_000)
    pipeline = load_official(tmp_path / "out")
    state = pipeline.transformer.state_dict()
    assert exported.tensors == len(state) and state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    base = load_official(tmp_path / "base")
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(base.transformer.state_dict()[name], state[name]) for name in names[:2])
    assert pipeline.components.keys() == base.components.keys()
    assert {name: type(part) for name, part in pipeline.components.items()} == {
        name: type(part) for name, part in base.components.items()
    }
    place_alike(base, pipeline)
    _, shape = shape_of(family)
    noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(3))
    before, actual = (official_latents(each, family, noise, 2, 4.0) for each in (base, pipeline))
    base.register_modules(transformer=model.eval())  # the weights as they were trained, in memory
    place_alike(base)
    truth = official_latents(base, family, noise, 2, 4.0)
    torch.testing.assert_close(actual, truth, atol=1e-6, rtol=0)
    assert (actual - before).abs().max() > 1e-3  # it is not the base's


def test_sampling_takes_from_the_base_what_did_not_train(tmp_path: Path) -> None:
    run, model = made_run(tmp_path, tiny_repositories.save_wan(tmp_path / "base"), frozen=2)
    own = TextToVideo.from_run(run, device="cpu").model.state_dict()
    assert own.keys() == model.state_dict().keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())
