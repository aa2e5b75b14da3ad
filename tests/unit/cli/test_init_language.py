"""`mmspeed init --task language --model`: recipes, twins for a CPU, and weights of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from mmspeed.__main__ import main
from mmspeed.config import load_config
from mmspeed.config.language import LanguageConfig
from mmspeed.models.language.shapes import SHAPES
from mmspeed.pipelines.tasks.language import LanguageTask
from mmspeed.protocols import plan_of
from tests.support.covers import slow_but


def written(folder: Path, model: str, *more: str) -> LanguageConfig:
    assert main(["init", str(folder / "run.yaml"), "--task", "language", "--model", model, "--force", *more]) == 0
    return cast(LanguageConfig, load_config(folder / "run.yaml"))


@pytest.mark.parametrize("name", slow_but(SHAPES, ("deepseek-v3", "pangu-ultra-moe", "qwen3-235b-a22b", "llama3-405b")))
def test_each_shape_has_a_recipe_whose_layout_fits(tmp_path: Path, name: str) -> None:
    config = written(tmp_path, name)
    task = LanguageTask(config)
    task.use(None)._check_sizes()
    assert task.settings == SHAPES[name].settings
    model = task.outlines()["model"]
    plan = plan_of(model)
    assert (
        plan is not None
        and len(plan.blocks) == SHAPES[name].settings.num_hidden_layers + SHAPES[name].settings.num_nextn_predict_layers
    )
    assert config.device.dtype == "bfloat16" and config.train.samples_per_step >= 512


def test_twins_and_weights_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a hare"}) + "\n")
    twin = written(tmp_path, "tiny-deepseek-v3", "--texts", str(tmp_path / "a.jsonl"))
    assert twin.model.shape == "tiny-deepseek-v3" and twin.texts.sources[0].path == str(tmp_path / "a.jsonl")
    (tmp_path / "weights").mkdir()
    assert written(tmp_path, str(tmp_path / "weights")).model.pretrained == str(tmp_path / "weights")
    assert written(tmp_path, "Qwen/Qwen3-0.6B").model.pretrained == "Qwen/Qwen3-0.6B"
    capsys.readouterr()
    assert main(["init", str(tmp_path / "run.yaml"), "--task", "language", "--model", "qwen-8b", "--force"]) == 1
    assert "'qwen-8b' is no recipe; did you mean 'qwen3-8b'" in capsys.readouterr().err
