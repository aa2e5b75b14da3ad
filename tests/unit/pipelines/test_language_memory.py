"""Memory budgets of decoders: blocks that return nothing, or an auxiliary loss, beside their tokens, and blocks that are in no list."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.pipelines import TrainPipeline
from mmspeed.protocols import keep_blocks, plan_of
from tests.unit.pipelines.test_language_start import config, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "shape: tiny-deepseek-v3"  # with a module for one more token
    ],
)
def test_a_run_within_a_budget_computes_what_one_without_does(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = [f"model={{{model}}}", "sequence_length=256"]
    free = config(tmp_path, "name=free", *changes)
    TrainPipeline(free, online=True).run()
    with pytest.raises(UserError, match="takes at least") as error:
        TrainPipeline(config(tmp_path, "name=least", *changes, "memory.budget=1MB")).run()
    number = re.search(r"at least ([\d.]+) MB", str(error.value))
    assert number is not None
    with caplog.at_level(logging.INFO, "mmspeed"):
        TrainPipeline(config(tmp_path, "name=tight", *changes, f"memory.budget={float(number[1]) * 1.02:.1f}MB")).run()
    lines = [line for line in caplog.messages if line.startswith("memory: ")]
    assert any("recompute" in line for line in lines), lines
    assert losses(tmp_path, "tight") == pytest.approx(losses(tmp_path, "free"), rel=1e-6)


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_plan_follows_the_blocks_that_are_kept(shape: str) -> None:
    """Names of its plan are those of the modules that are left, with the entries that they had."""
    settings = replace(tiny_twin(SHAPES[shape].settings), num_nextn_predict_layers=1)
    if settings.experts is not None:
        settings = replace(settings, experts=replace(settings.experts, balance="sequence"))
    model = Decoder(settings)
    before = model.plan
    last = settings.num_hidden_layers - 1
    keep_blocks(model, [last])
    kept = plan_of(model)
    assert kept is not None and [block.name for block in kept.blocks] == ["layers.0", "mtp.0.mtp_block"]
    for old, new in ((before.inputs, kept.inputs), (before.outputs, kept.outputs), (before.linears, kept.linears)):
        assert {name for name in new if name not in dict(model.named_modules())} == set()
        moved = {name.replace(f"layers.{last}.", "layers.0.", 1): entry for name, entry in old.items()}
        assert all(moved[name] == entry for name, entry in new.items() if name != "layers.0")
    assert kept.inputs["layers.0"] == before.inputs[f"layers.{last}"]
    assert set(kept.attention) == {"layers.0.self_attn.attend", "mtp.0.mtp_block.self_attn.attend"}
