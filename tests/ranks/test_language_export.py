"""Weights of transformers through a run on several processes: after a step of learning rate nearly 0 they are the same bytes and names.

A config refuses the learning rate 0; with 1e-30 no float32 weight but 0 changes, and the random ones hold no 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspeed.config import make_config
from mmspeed.log import read_metrics
from mmspeed.models.language.decoder import Decoder
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.inference.language import export_language_run
from mmspeed.preprocess.texts.preparation import TextPreparation
from mmspeed.protocols import source_of
from tests.support.language_models import saved
from tests.support.spawn import run_ranks

TEXTS = "\n\n".join(f"the rabbit {n} runs over a meadow of {n * n} flowers" for n in range(40))


def config(folder: Path, **parallel: int) -> Any:
    (folder / "a.txt").write_text(TEXTS)
    tree = {
        "task": "language",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.txt")}], "cache": str(folder / "cache"), "validation": 0.0},
        "model": {"pretrained": str(folder / "base")},
        "objective": {"balance_rate": 0.0},  # biases of experts stay, too
        "sequence_length": 33,
        "train": {"steps": 1, "batch_size": 2, "lr": 1e-30, "warmup_steps": 0, "ema_decay": 0.5},
        "parallel": {"strategy": "fsdp", **parallel},
        "device": {"kind": "cpu"},
    }
    return make_config(tree, (), origin="test")


def trained(folder: Path, parallel: dict[str, int]) -> None:
    TrainPipeline(config(folder, **parallel)).run()


def test_the_balance_of_a_folders_experts_is_that_of_the_config(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path / "base", vocab_size=320)
    whole = config(tmp_path)
    task = LanguageDomain(whole.model_copy(update={"model": whole.model.model_copy(update={"balance": "sequence"})}))
    for _ in range(2):  # the second one opens the folder again
        model = task.build()["model"]
        assert isinstance(model, Decoder) and model.settings == task.settings and source_of(model) is not None
        assert model.settings.experts is not None
        assert (model.settings.experts.balance, model.settings.experts.balance_rate) == ("sequence", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parallel"), [("qwen3_tied", {"tp": 2}), ("deepseek_v3", {"tp": 2, "ulysses": 2})])
def test_an_unchanged_import_is_exported_byte_for_byte(kind: str, parallel: dict[str, int], tmp_path: Path) -> None:
    saved(kind, tmp_path / "base", vocab_size=320)
    whole = config(tmp_path, **parallel)
    TextPreparation(whole).build()
    run_ranks(trained, 4, tmp_path, parallel)
    row = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert row["grad_norm"] > 0  # a step was taken
    base = load_file(tmp_path / "base" / "model.safetensors")
    for weights in ("model", "ema"):
        out = tmp_path / weights
        export_language_run(whole.run_dir, out, weights=weights)  # type: ignore[arg-type]
        written = load_file(out / "model.safetensors")
        assert written.keys() == base.keys()
        for name, value in base.items():
            assert written[name].dtype == value.dtype and torch.equal(written[name], value), name
