"""`mmspeed init --task language --model`: recipes, twins for a CPU, and weights of transformers."""

from __future__ import annotations

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest

from mmspeed.__main__ import main
from mmspeed.axes import AxisName, mesh_table
from mmspeed.config import load_config
from mmspeed.config.adapters import AdapterConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.log import format_bytes
from mmspeed.models.language.families import config_tree
from mmspeed.models.language.shapes import SHAPES, shape_named
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.tuning.base_choice import for_tensors
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.preprocess.texts.preparation import RECIPES
from mmspeed.protocols import plan_of
from tests.support.covers import slow_but


def written(folder: Path, model: str, *more: str) -> LanguageConfig:
    assert main(["init", str(folder / "run.yaml"), "--task", "language", "--model", model, "--force", *more]) == 0
    return cast(LanguageConfig, load_config(folder / "run.yaml"))


@pytest.mark.parametrize("name", slow_but(SHAPES, ("deepseek-v3", "pangu-ultra-moe", "qwen3-235b-a22b", "llama3-405b")))
def test_each_shape_has_a_recipe_whose_layout_fits(tmp_path: Path, name: str) -> None:
    config = written(tmp_path, name)
    task = LanguageDomain(config)
    task.use(None)._check_sizes()
    assert task.settings == SHAPES[name].settings
    model = task.outlines()["model"]
    plan = plan_of(model)
    assert (
        plan is not None
        and len(plan.blocks) == SHAPES[name].settings.num_hidden_layers + SHAPES[name].settings.num_nextn_predict_layers
    )
    assert config.device.dtype == "bfloat16" and config.train.samples_per_step >= 512


EXPERTS = [name for name, shape in SHAPES.items() if shape.active]


@pytest.mark.parametrize("name", slow_but(EXPERTS, EXPERTS[1:]))
def test_a_recipe_of_experts_fits_the_devices_that_it_states(tmp_path: Path, name: str) -> None:
    """Its processes divide the experts, and a step takes the memory that its head says, less than there is."""
    config = written(tmp_path, name)
    parallel = config.parallel
    head = (files("mmspeed") / RECIPES / f"{name}.yaml").read_text().replace("\n# ", " ")
    [found] = re.findall(r"([\d,]+) devices of (\d+) GB", head)
    devices, size = (int(number.replace(",", "")) for number in found)
    assert parallel.ep > 1 and mesh_table(devices, parallel.axis_sizes()).sizes[AxisName.EP] == parallel.ep
    peak = plan_memory(config, world=devices, with_swap=False, options=False).figures.plain_peak()
    assert peak <= for_tensors(size * 10**9)
    assert f"a step takes {format_bytes(peak)} of a device" in head


def test_twins_and_weights_to_go_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a hare"}) + "\n")
    twin = written(tmp_path, "tiny-deepseek-v3", "--texts", str(tmp_path / "a.jsonl"))
    assert twin.model.shape == "tiny-deepseek-v3" and twin.texts.sources[0].path == str(tmp_path / "a.jsonl")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config_tree(shape_named("qwen3-0.6b").settings)))
    assert written(tmp_path, str(tmp_path / "weights")).model.pretrained == str(tmp_path / "weights")
    assert written(tmp_path, "Qwen/Qwen3-0.6B").model.pretrained == "Qwen/Qwen3-0.6B"
    assert "training goes on from the weights of Qwen/Qwen3-0.6B" in capsys.readouterr().out
    for more in ([], ["--full"]):
        lora = written(tmp_path, str(tmp_path / "weights"), "--adapter", "lora", "--rank", "8", *more)
        assert lora.model.adapter == AdapterConfig(kind="lora", rank=8, alpha=8, targets="attention+mlp")
        assert (lora.model.base.dtype, lora.device.dtype, lora.train.lr) == ("bfloat16", "bfloat16", 1e-4)
    shutil.copytree(tmp_path / "weights", tmp_path / "tiny-qwen3-0.6b")
    monkeypatch.chdir(tmp_path)  # a folder that exists is one, also by the name of a twin
    assert written(tmp_path, "tiny-qwen3-0.6b").model.pretrained == str(tmp_path / "tiny-qwen3-0.6b")
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["init", str(tmp_path / "b.yaml"), "--task", "language", "--model", str(tmp_path / "weights")]) == 1
    assert "models of type 'gpt2' are not read" in capsys.readouterr().err and not (tmp_path / "b.yaml").exists()
    assert main(["init", str(tmp_path / "run.yaml"), "--task", "language", "--model", "qwen-8b", "--force"]) == 1
    assert "'qwen-8b' is no recipe; did you mean 'qwen3-8b'" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "run.yaml"), "--task", "language", "--model", "tiny-foo", "--force"]) == 1
    assert "'tiny-foo' is no recipe" in capsys.readouterr().err
    for words, said in (
        (["qwen3-0.6b"], "qwen3-0.6b is a language model: add --task language"),
        (["wan2.1-1.3b", "--task", "language"], "wan2.1-1.3b is no language model: leave --task language"),
    ):
        assert main(["init", str(tmp_path / "c.yaml"), "--model", *words]) == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        ("qwen3-0.6b", 10_000, (512, 8, 1000, 1e-3)),
        ("qwen3-0.6b", 10**9, (4096, 1024, 1000, 1e-3)),
        ("tiny-qwen3-0.6b", 10_000, (512, 8, 1000, 3e-3)),
        ("Qwen/Qwen3-0.6B", 10_000, (512, 8, 50, 1e-5)),
        ("Qwen/Qwen3-0.6B", 10**8, (1024, 8, 9156, 1e-5)),
    ],
)
def test_packs_and_steps_fit_the_texts(
    tmp_path: Path, model: str, size: int, expected: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write(json.dumps({"text": "a hare"}) + "\n")
        file.truncate(size)
    config = written(tmp_path, model, "--texts", str(tmp_path / "a.jsonl"))
    train = config.train
    assert (config.sequence_length, train.samples_per_step, train.steps, train.lr) == expected
    assert train.warmup_steps <= train.steps // 10
    printed = capsys.readouterr().out
    random = "begins with random weights, to be trained from nothing; for published ones: --model Qwen/Qwen3-0.6B"
    assert (random in printed) == ("/" not in model)
