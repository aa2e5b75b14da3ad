"""Ways, tiers and budgets on tiny models, and `mmspeed bench memory` of a config's own step."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from mmspeed.bench.memory import BenchModel
from mmspeed.bench.memory_tiers import TierModelSize, measure_tiers
from mmspeed.cli.app import run
from mmspeed.config import Config, dump_config, make_config
from mmspeed.memory.planning.tracked import kept_bytes
from tests.claims import memory_budget
from tests.claims.memory import CASES, PolicyResult, WaysSetting, measure
from tests.claims.memory_budget import measure_budgets
from tests.support.runs import small_config

TINY = WaysSetting(width=96, heads=4, rank=8, depth=2, latent=(5, 16, 16), rounds=1, device="cpu")


@pytest.fixture(scope="module")
def measurement() -> PolicyResult:
    wanted = ("plain", "block: recompute", "block: offload", "block: offload_selective", "mlp in 4 parts")
    return measure(TINY, [case for case in CASES if case.name in wanted])


@pytest.mark.slow
def test_ways_are_reported_with_what_they_give_and_cost(measurement: PolicyResult) -> None:
    plain, again, offloaded, cheap, parts = measurement.rows
    assert all(row.equal for row in measurement.rows[:-1]) and plain.time == 1.0
    # whether parts are bitwise is this machine's affair
    assert parts.distance < 1e-5 and (parts.distance == 0) == parts.equal
    assert plain.work < parts.work < 1.5 * plain.work and parts.kept < 0.8 * plain.kept
    assert again.kept < 0.2 * plain.kept and again.backward_matmuls > plain.backward_matmuls
    assert cheap.backward_matmuls == offloaded.backward_matmuls == plain.backward_matmuls
    assert plain.host == again.host == 0


def test_what_is_measured_is_let_go() -> None:
    stage = BenchModel(TINY)
    seen = []

    def forward() -> Any:
        out = stage.model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
        loss = stage.forward()
        out.remove()
        return loss

    assert kept_bytes(stage.device, stage.model, forward, stage.inputs) > 1e6
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None
    assert all(parameter.grad is None for parameter in stage.model.parameters())


def test_tiers_have_the_bytes_they_are_meant_to_have() -> None:
    rows = measure_tiers(TierModelSize(width=192, depth=2, heads=6, rank=16), rounds=1, device="cpu", bucket="1MiB")
    assert [round(row.device) for row in rows] == [12, 4, 14, 12, 4, 2]
    assert [row.equal for row in rows] == [None, True, None, True, True, True]
    assert all(row.passed() for row in rows)


@pytest.mark.slow
def test_a_budget_is_kept_to_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*options: Any) -> Config:
        overrides = ["model.depth=6", "data.buckets=[{frames: 17, height: 128, width: 128}]"]
        return make_config(setting(*options).model_dump(mode="json"), overrides, origin="test")

    setting = memory_budget.setting
    monkeypatch.setattr(memory_budget, "setting", small)
    actual = measure_budgets("full", "cpu", shares=(0.5, 0.001))
    half, none = actual.rows
    assert half.passed() and half.measured is not None and half.measured <= half.budget and half.ways
    assert none.measured is None and "at least" in str(none.reason) and not actual.passed()


def test_the_step_of_a_config_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, "memory.activation_policy={block: recompute}")
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert run(["bench", "memory", str(path), "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "at the peak" in shown and "kept for backward" in shown and "optimizer" in shown
    written = json.loads((tmp_path / "out" / "memory.json").read_text())["report"]
    assert sum(written["categories"].values()) == written["peak"] > 0
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")
