"""Adapters of further models over two processes: the losses and gradients of one process, and a stopped run goes on to the bit.

Two experts, a model with weights that no training reaches, a control video, decoders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import make_config
from mmspeed.config.schema import RunConfig
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.language.small import write_model
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.checkpoints import differing, farthest_gradient, whole_checkpoint
from tests.support.experts import experts_config
from tests.support.runs import losses
from tests.support.spawn import run_ranks
from tests.support.tiny_repositories import REPOSITORIES, save_wan_experts, save_wan_vace
from tests.unit.pipelines.test_control import control_config
from tests.unit.pipelines.test_family_chain import BUCKETS
from tests.unit.pipelines.test_language_start import config as language_config

STEPS, STOPS = 4, (1, 3, 4)
ADAPTER = {"kind": "lora", "rank": 3, "alpha": 6, "targets": "attention+mlp"}
LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "tp": ("parallel.strategy=fsdp", "parallel.tp=2"),
    "pp": ("parallel.pp=2", "train.micro_batch_size=1"),
}
# model -> (its repository, layouts)
VIDEO: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ltx": (REPOSITORIES["ltx"], ("ddp", "fsdp", "pp")),
    "hunyuan-video-1.5": (REPOSITORIES["hunyuan-video-1.5"], ("ddp", "fsdp")),
    "wan-vace": (save_wan_vace, ("fsdp",)),
    "experts": (save_wan_experts, ("ddp", "fsdp")),
}
DECODERS = ("qwen3-8b", "llama3-8b")
MODELS = (*VIDEO, *DECODERS)
CASES = [(name, each) for name, (_, layouts) in VIDEO.items() for each in layouts]
CASES += [(name, each) for name in DECODERS for each in LAYOUTS]


Trees = dict[str, dict[str, Any]]  # configs by model


def tree_of(home: Path, model: str) -> dict[str, Any]:
    """The config of a model in a folder of its own, whose clips it writes."""
    section = {"pretrained": str(home / "base"), "adapter": ADAPTER}
    config: RunConfig
    if model in DECODERS:
        config = language_config(home, f"model={json.dumps(section)}", "train.ema_decay=0.9")
    elif model == "experts":
        config = experts_config(home, f"model.adapter={json.dumps(ADAPTER)}")
    else:
        config = control_config(home, model={"kind": "diffusers", **section}, vae=None)
    tree = config.model_dump(mode="json", by_alias=True)
    tree["train"] |= {"lr": 1e-3, "warmup_steps": 0, "steps": STEPS}
    tree["validate"]["samples"], tree["checkpoint"]["keep_last"] = 0, 3
    if model not in (*DECODERS, "experts", "wan-vace"):
        buckets = f"data.buckets=[{BUCKETS[model]}]"
        sources = f"data.sources=[{{path: {home / 'clips.jsonl'}}}]"
        tree = make_config(tree, (buckets, sources, "data.fps=null")).model_dump(mode="json", by_alias=True)
    return tree


def train(trees: Trees, runs: list[tuple[str, str]]) -> None:
    """Train (model, layout), on however many ranks call this: with stops, and over processes once as a whole."""
    for model, layout in runs:
        start = f"train.start_from={Path(trees[model]['output']) / 'start'}"
        whole = [] if layout == "one" else [(f"{layout}-whole", STEPS)]
        for name, stop in (*whole, *((layout, stop) for stop in STOPS)):
            keys = f"name={name}", f"train.steps={stop}", start, *LAYOUTS.get(layout, ())
            TrainPipeline(make_config(trees[model], keys, origin="test")).run()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """Bases, caches, runs whose adapters have moved off their zeros, and from there runs of one process and of all layouts."""
    results = {}
    for model in MODELS:
        home = tmp_path_factory.mktemp(model)
        if model in DECODERS:
            write_model(tiny_twin(SHAPES[model].settings), home / "base", seed=1)
        else:
            VIDEO[model][0](home / "base")
        results[model] = tree_of(home, model)
        moved = "name=start", "train.lr=0.02", "train.ema_decay=null"
        config: Any = make_config(results[model], moved, origin="test")
        (TextPreparation(config).build if model in DECODERS else CacheBuilder(config).run)()
        TrainPipeline(config).run()
    run_ranks(train, 1, results, [(model, "one") for model in MODELS])
    run_ranks(train, 2, results, CASES, timeout=500)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_two_processes_learn_what_one_does(trees: Trees, model: str, layout: str) -> None:
    names = "one", layout, f"{layout}-whole"
    one, two, whole = (make_config(trees[model], (f"name={name}",), origin="test") for name in names)
    assert losses(two) == losses(whole) == pytest.approx(losses(one), rel=1e-5) and len(losses(one)) == STEPS
    assert not differing(whole_checkpoint(two.run_dir), whole_checkpoint(whole.run_dir))
    for step in STOPS:
        name = f"checkpoints/step-{step:08d}"
        true, found = (whole_checkpoint(each.run_dir, each.run_dir / name) for each in (one, two))
        assert found.keys() == true.keys()
        assert farthest_gradient(true, found) < (1e-5 if step == 1 else 1e-3)
